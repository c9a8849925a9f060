"""TRL's side of vs_trl.py, a process of its own: `python trl_side.py SPEC.json RESULT.json`.

Trains GRPOTrainer on the rows of the specification, in their order, and writes one record a step. It
generates with transformers: TRL's vLLM server mode sends weights over NCCL, which needs NVIDIA GPUs, and its
colocated mode loads them with vLLM's `load_weights`, which the CPU engine's repacked layers refuse.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_spec import TrlSpec

from asyncrl.envs.reward_messages import RewardRequest, RewardSpec
from asyncrl.envs.rewards import resolve_reward


@dataclass(slots=True)
class StepRecord:
    """One optimizer step."""

    completion_tokens: int
    reward_mean: float
    end_s: float = 0.0
    """time.monotonic() when the step had ended."""


@dataclass(slots=True)
class StepRecorder:
    """Counts what each step generated, through TRL's reward function, and when it ended."""

    reward_name: str
    start_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)

    def reward_function(self) -> Any:
        """TRL's reward function: (completions, completion_ids, columns of the rows) -> [rewards]."""
        reward = resolve_reward(RewardSpec(self.reward_name))

        def score(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
            texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
            answers = columns.get("answer") or [""] * len(texts)
            rewards = [
                reward.call(RewardRequest([text], [ids], {"answer": answer}, answer=answer))
                for text, ids, answer in zip(texts, completion_ids, answers, strict=True)
            ]
            self.steps.append(StepRecord(sum(map(len, completion_ids)), sum(rewards) / len(rewards)))
            return rewards

        return score

    def callback(self) -> TrainerCallback:
        recorder = self

        class Clock(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                recorder.start_s = time.monotonic()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                recorder.steps[-1].end_s = time.monotonic()

        return Clock()


def train_with_trl(spec: TrlSpec) -> StepRecorder:
    """Trains `spec.num_steps` steps. Raises ValueError when TRL's prompts have other tokens."""
    torch.set_num_threads(spec.num_threads)
    tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
    model = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=torch.float32)
    recorder = StepRecorder(spec.reward)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=recorder.reward_function(),
        args=GRPOConfig(output_dir=spec.output_dir, **spec.trainer_arguments()),
        train_dataset=Dataset.from_list(spec.rows),
        processing_class=tokenizer,
        callbacks=[recorder.callback()],
    )
    prompt_ids, *_ = trainer._tokenize_prompts([row["prompt"] for row in spec.rows])
    if prompt_ids != spec.prompt_ids:
        raise ValueError("TRL tokenises the prompts differently: the two sides would not do the same work")
    trainer.train()
    return recorder


def main() -> None:
    spec_file, result_file = map(Path, sys.argv[1:])
    recorder = train_with_trl(TrlSpec(**json.loads(spec_file.read_text())))
    result = {"start_s": recorder.start_s, "steps": [asdict(step) for step in recorder.steps]}
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
