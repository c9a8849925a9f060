"""One path of learner.py in a process of its own: `python learner_side.py PATH SPEC.json RESULT.json`.

PATH: asyncrl | padded | trl. Each does whole updates on the same batch: forward, loss, backward, clipping, AdamW.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from learner_batch import BatchSpec, ModelShape, draw_groups, shard_of
from torch import Tensor
from torch.nn.functional import linear

from asyncrl.config import load_config
from asyncrl.coordinator.batches import plan_batch
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.update import PolicyLearner
from asyncrl.types import TrajectoryGroup

Update = Callable[[], dict[str, float]]
GEMM_ROUNDS = 3


def main() -> None:
    path, spec_file, result_file = sys.argv[1:4]
    asked = json.loads(Path(spec_file).read_text())
    spec, model = BatchSpec(**asked["batch"]), Path(asked["model"])
    torch.set_num_threads(asked["threads"])
    base_bytes = resident_bytes()
    shape = ModelShape.of(model)
    groups = draw_groups(spec, shape.vocabulary)
    with tempfile.TemporaryDirectory() as scratch:
        update = PATHS[path](model, spec, groups, Path(scratch), asked["overrides"])
        update()  # allocates gradients and moments
        measured = [measure(update, shape, spec) for _ in range(asked["updates"])]
    result = {
        "update_s": [m["update_s"] for m in measured],
        "peak_bytes": max(m["peak_bytes"] for m in measured) - base_bytes,
        "gemm_flops_per_s": {name: [m["gemm"][name] for m in measured] for name in measured[0]["gemm"]},
        "loss": measured[-1]["loss"],
    }
    Path(result_file).write_text(json.dumps(result))


def measure(update: Update, shape: ModelShape, spec: BatchSpec) -> dict[str, Any]:
    """One update, its highest memory, and the rates of the model's own GEMM shapes right after it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    start_s = time.perf_counter()
    metrics = update()
    update_s = time.perf_counter() - start_s
    return {
        "update_s": update_s,
        "peak_bytes": peak_bytes(),
        "gemm": gemm_rates(shape, spec.max_tokens_per_microbatch),
        "loss": metrics["loss"],
    }


def gemm_rates(shape: ModelShape, num_tokens: int) -> dict[str, float]:
    """FLOP/s of the forward and both backward products of each matrix, at a microbatch's tokens; best of a few."""
    rates = {}
    for name, (inputs, outputs, _) in shape.matrices().items():
        rates[name] = gemm_rate(num_tokens, inputs, outputs)
    rates["head"] = gemm_rate(1024, shape.hidden, shape.vocabulary)
    return rates


def gemm_rate(num_tokens: int, inputs: int, outputs: int) -> float:
    x, w, g = torch.randn(num_tokens, inputs), torch.randn(outputs, inputs), torch.randn(num_tokens, outputs)
    best_s = float("inf")
    for _ in range(GEMM_ROUNDS):
        start_s = time.perf_counter()
        linear(x, w)
        g @ w
        g.T @ x
        best_s = min(best_s, time.perf_counter() - start_s)
    return 6.0 * num_tokens * inputs * outputs / best_s


def asyncrl_path(
    model: Path, spec: BatchSpec, groups: list[TrajectoryGroup], scratch: Path, overrides: Sequence[str]
) -> Update:
    """PolicyLearner.update, as a learner rank calls it."""
    config = load_config(
        None,
        [
            f"model={model}",
            f"learner.max_tokens_per_microbatch={spec.max_tokens_per_microbatch}",
            f"rollout.max_completion_tokens={spec.max_completion_tokens}",
            f"rollout.group_size={spec.group_size}",
            "learner.lr=1e-6",
            *overrides,
        ],
    )
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
    learner = PolicyLearner(model, config, mesh=make_mesh("cpu", 1))
    plan = plan_batch(0, groups, num_ranks=1, max_tokens=spec.max_tokens_per_microbatch, hidden_size=576)
    shard = shard_of(plan, groups)

    def update() -> dict[str, float]:
        return {"loss": learner.update(shard)["actor/pg_loss"]}

    return update


class PaddedRows:
    """Prompt and completion a row, padded on the right; what the plain path and TRL train on."""

    def __init__(self, rows: Sequence[tuple[TrajectoryGroup, int, float]]) -> None:
        self.prompts = [torch.from_numpy(g.prompt_ids).long() for g, _, _ in rows]
        self.completions = [torch.from_numpy(g.trajectories[i].token_ids).long() for g, i, _ in rows]
        self.advantages = torch.tensor([a for _, _, a in rows])

    def padded_completions(self, width: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(self.completions), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, completion in enumerate(self.completions):
            ids[i, : len(completion)] = completion
            mask[i, : len(completion)] = 1
        return ids, mask


def rows_of(groups: list[TrajectoryGroup]) -> list[tuple[TrajectoryGroup, int, float]]:
    rows = []
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        rows += [(group, i, float(a)) for i, a in enumerate(advantages)]
    return rows


def padded_path(
    model: Path, spec: BatchSpec, groups: list[TrajectoryGroup], scratch: Path, overrides: Sequence[str]
) -> Update:
    """Transformers on padded rows, all logits held; rows sorted by length, so that little is padded."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    rows = sorted(rows_of(groups), key=lambda row: len(row[0].trajectories[row[1]]))
    num_trained = sum(group.num_trained_tokens for group in groups)
    microbatches: list[list[Any]] = []
    for row in rows:
        width = len(row[0].prompt_ids) + len(row[0].trajectories[row[1]])
        if not microbatches or (len(microbatches[-1]) + 1) * width > spec.max_tokens_per_microbatch:
            microbatches.append([])
        microbatches[-1].append(row)

    def update() -> dict[str, float]:
        total = 0.0
        for microbatch in microbatches:
            padded = PaddedRows(microbatch)
            width = max(len(c) for c in padded.completions)
            completions, mask = padded.padded_completions(width)
            prompts = torch.stack(padded.prompts)
            ids = torch.cat([prompts, completions], 1)
            attention = torch.cat([torch.ones_like(prompts), mask], 1)
            logits = policy(input_ids=ids, attention_mask=attention, use_cache=False).logits
            logprobs = logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
            entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
            chosen = logprobs.gather(-1, completions[..., None])[..., 0]
            ratio = (chosen - chosen.detach()).exp()
            loss = -(ratio * padded.advantages[:, None] * mask).sum() / num_trained
            loss.backward()
            total += float(loss.detach()) + 0.0 * float(entropy.mean())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total}

    return update


def trl_path(
    model: Path, spec: BatchSpec, groups: list[TrajectoryGroup], scratch: Path, overrides: Sequence[str]
) -> Update:
    """TRL's GRPOTrainer: its own loss on one group a microbatch, padded to the batch's longest as TRL pads."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        per_device_train_batch_size=spec.group_size,
        gradient_accumulation_steps=spec.num_groups,
        num_generations=spec.group_size,
        max_completion_length=spec.max_completion_tokens,
        learning_rate=1e-6,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.model_wrapped = trainer.model
    trainer.current_gradient_accumulation_steps = spec.num_groups
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    rows = rows_of(groups)
    width = max(len(t) for g in groups for t in g.trajectories)
    num_items = torch.tensor(float(sum(group.num_trained_tokens for group in groups)))
    policy.train()

    def update() -> dict[str, float]:
        total = 0.0
        for first in range(0, len(rows), spec.group_size):
            padded = PaddedRows(rows[first : first + spec.group_size])
            completions, mask = padded.padded_completions(width)
            prompts = torch.stack(padded.prompts)
            inputs = {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": completions,
                "completion_mask": mask,
                "advantages": padded.advantages,
                "num_items_in_batch": num_items,
            }
            loss = trainer.compute_loss(trainer.model, inputs)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total}

    return update


PATHS: dict[str, Callable[..., Update]] = {"asyncrl": asyncrl_path, "padded": padded_path, "trl": trl_path}


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
