"""Plain vLLM, as a user of an exported model runs it: `greedy.py MODEL < prompts.json > completions.json`.

A program of its own, since vLLM is set up by its process's environment. Used by test_eval_command.py.
"""

from __future__ import annotations

import json
import os
import sys


def complete(model: str, prompts: list[str], max_tokens: int) -> list[str]:
    """The greedy completion of each prompt by vLLM's `LLM`, in float32."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process that could outlive this one
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        enforce_eager=True,
        kv_cache_memory_bytes=2**26,
        generation_config="vllm",
    )
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    completions = complete(sys.argv[1], asked["prompts"], asked["max_tokens"])
    print("\n" + json.dumps(completions))
