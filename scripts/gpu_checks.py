"""Runs every check that needs a GPU and prints one JSON line a check: name, ok, figure, seconds.

    python scripts/gpu_checks.py                  on one GPU, under 8 minutes
    python scripts/gpu_checks.py --device cpu     the same code over smaller shapes, on gloo
    ... --quick                                   without the checks that start vLLM
    ... --only update snapshot                    some of them

A failing check is recorded with its error and the next one runs. `ok` is null for a skipped one, with the
reason. Exit code 1 when any failed. docs/gpu-checks.md says what each must show.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in (".", "tests", "tests/learner"))

import numpy as np
import torch
import torch.distributed as dist
import transformers
from blake3 import blake3
from learner_cases import (  # pyright: ignore[reportMissingImports]
    plain_rows,
    record_gradients,
    sgd_config,
    shard_of,
    trajectory,
    uneven_groups,
    weights,
    write_model,
)
from torch import Tensor
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import Config, RolloutConfig
from asyncrl.errors import first_cause
from asyncrl.launch.resources import count_gpus
from asyncrl.learner.attention import GroupLayout, attend_padded
from asyncrl.learner.logprobs import linear_logprobs
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.model import decoder_blocks
from asyncrl.learner.publish import SnapshotPublisher
from asyncrl.learner.update import PolicyLearner
from asyncrl.learner.varlen_attention import attend_varlen, has_varlen_kernel
from asyncrl.types import SamplingSpec, Shard, TrajectoryGroup
from asyncrl.weight_sync.manifest import Manifest, lay_out
from asyncrl.weight_sync.snapshot import SnapshotWriter, bytes_free, map_readonly, verify

if TYPE_CHECKING:
    from asyncrl.rollout_server.engine import Completion, GenerationRequest
    from asyncrl.rollout_server.vllm_engine import VllmEngine

Figure = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]

GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative distance of a tensor's gradient from float32 rows on a CPU."""
SERVED_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Mean distance of an engine's log-probs from float32 ones of the same weights, in nats."""
POLICY_SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Qwen2.5-0.5B's."""
SMALL_POLICY_SHAPE: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 56,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The same with `--device cpu`."""
ENGINE_START_TIMEOUT_S = 150.0
TRAIN_TIMEOUT_S = 240.0


class Skipped(Exception):
    """The check cannot run here, for the reason that the exception names."""


@dataclass
class Bench:
    """What the checks share: the device, a scratch folder, and one policy of Qwen2.5-0.5B's shape."""

    device: torch.device
    folder: Path
    quick: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Over a process group of this process alone: NCCL on a GPU, gloo on a CPU."""
        if self.on_gpu:
            torch.cuda.set_device(0)
        store = f"file://{self.folder}/store"
        dist.init_process_group("nccl" if self.on_gpu else "gloo", init_method=store, rank=0, world_size=1)
        return make_mesh(self.device.type, 1)

    @cached_property
    def config(self) -> Config:
        """What the shared policy is trained and published with: on a GPU the defaults."""
        dtype = "auto" if self.on_gpu else "bfloat16"
        return Config.model_validate(
            {"learner": {"dtype": dtype}, "weight_sync": {"dir": self.snapshot_folder}}
        )

    @cached_property
    def learner(self) -> PolicyLearner:
        shape = POLICY_SHAPE if self.on_gpu else SMALL_POLICY_SHAPE
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
        model.bfloat16().save_pretrained(self.folder / "policy")
        return PolicyLearner(self.folder / "policy", self.config, mesh=self.mesh)

    @property
    def snapshot_folder(self) -> str:
        """Shared memory where it has room for what the checks write, else the scratch folder."""
        return "/dev/shm" if bytes_free("/dev/shm") > 4 * 2**30 * self.on_gpu + 2**26 else str(self.folder)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> int:
        """Forgets the peak of allocated memory. Returns what is allocated now, in bytes."""
        if not self.on_gpu:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak_gb(self, since_bytes: int = 0) -> float | None:
        """The peak above `since_bytes`; None on a CPU, where nothing counts it."""
        return (torch.cuda.max_memory_allocated() - since_bytes) / 1e9 if self.on_gpu else None

    def release_learner(self) -> None:
        """The engine needs the memory."""
        self.__dict__.pop("learner", None)
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def environment(bench: Bench) -> Figure:
    facts: Figure = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": vllm_version(),
    }
    if bench.on_gpu:
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
        facts |= {"gpu": torch.cuda.get_device_name(0), "num_gpus": torch.cuda.device_count()}
        facts |= {"gpu_memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9}
    return facts


def vllm_version() -> str | None:
    """Of the distribution that brings the module, which has another name for a CPU."""
    distributions = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(distributions[0]) if distributions else None


def gpu_count(bench: Bench) -> Figure:
    config = Config.model_validate({"resources": {"devices": bench.device.type}})
    counted, seen = count_gpus(config), torch.cuda.device_count() if bench.on_gpu else 0
    assert counted == seen, f"the launcher counts {counted} GPUs and torch {seen}"
    return {"num_gpus": counted}


def collectives(bench: Bench) -> Figure:
    """Of every dtype and operation that the learner's own reductions use."""
    group = bench.mesh.get_group()
    for dtype, operation in (
        (torch.uint8, dist.ReduceOp.SUM),
        (torch.int64, dist.ReduceOp.MIN),
        (torch.float32, dist.ReduceOp.MAX),
        (torch.float64, dist.ReduceOp.SUM),
    ):
        values = torch.tensor([1, 2, 250], dtype=dtype, device=bench.device)
        dist.all_reduce(values, operation, group=group)
        assert values.tolist() == [1, 2, 250], f"{operation} of {dtype} gives {values.tolist()}"
    dist.barrier()
    return {"backend": dist.get_backend(group)}


def gradients(bench: Bench, dtype: str) -> Figure:
    """Packed groups through FSDP against padded rows through plain transformers in float32 on the CPU."""
    worst = 0.0
    for kind, tied in (("llama", True), ("qwen2", False)):
        path = write_model(bench.folder / f"{kind}-{dtype}", kind, tied, dtype=getattr(torch, dtype))
        groups = uneven_groups()
        _, expected = plain_rows(path, groups, temperature=0.7)
        learner = PolicyLearner(path, sgd_config(dtype=dtype), mesh=bench.mesh)
        found = record_gradients(learner)
        learner.update(shard_of(groups, [[[0, 1, 2], [3, 4]]]))
        assert set(found) == set(expected), sorted(set(found) ^ set(expected))
        for name, gradient in expected.items():
            error = float((found[name].cpu() - gradient).norm() / gradient.norm())
            assert error < GRADIENT_TOLERANCE[dtype], f"{kind} {name}: relative error {error:.2e}"
            worst = max(worst, error)
    return {"largest_relative_error": worst, "tolerance": GRADIENT_TOLERANCE[dtype]}


def attention(bench: Bench) -> Figure:
    """Attention without padding, in bfloat16, against padded groups in float32; and the time of both in bfloat16."""
    if not bench.on_gpu:
        raise Skipped(
            "the kernel is a GPU's; tests/learner/test_varlen_attention.py puts a plain one in its place"
        )
    torch.manual_seed(3)
    lengths = (256 * torch.randn(16, 8).mul(0.8).exp()).clamp(1, 2048).int().tolist()
    layout = GroupLayout([(300, of_group) for of_group in lengths], bench.device)
    num_tokens = 16 * 300 + sum(map(sum, lengths))
    q, k, v, upstream = (torch.randn(num_tokens, heads, 64, device=bench.device) for heads in (14, 2, 2, 14))

    def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_padded(query, key, value, layout.padded, 0.125)

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_varlen(query, key, value, layout.varlen, 0.125)

    def run(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[list[Tensor], float]:
        """Output and gradients, and seconds of the second pass."""
        results: list[Tensor] = []
        start_s = 0.0
        for _ in range(2):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            bench.synchronize()
            start_s = time.monotonic()
            out = attend(*inputs)
            results = [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]
            bench.synchronize()
        return results, time.monotonic() - start_s

    expected, _ = run(padded, torch.float32)
    _, padded_s = run(padded, torch.bfloat16)
    assert has_varlen_kernel(q.to(torch.bfloat16)), "this GPU does not take the kernel"
    found, varlen_s = run(varlen, torch.bfloat16)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < 0.02, f"output and gradients of q, k, v are {errors} off (relative)"
    return {"tokens": num_tokens, "errors": errors, "varlen_s": varlen_s, "padded_s": padded_s}


def options(bench: Bench) -> Figure:
    """What changes the cost of an update and not its gradient; adapters; a critic and a reference model."""
    path = write_model(bench.folder / "options", "llama", True)
    shard = shard_of(uneven_groups(), [[[0, 1, 2], [3, 4]]])

    def trained(learner_table: dict[str, Any], algorithm: Any = "grpo") -> tuple[Any, Any, dict[str, float]]:
        table = {"optimizer": "sgd", "lr": 0.1, "dtype": "float32", "logprob_chunk_tokens": 7} | learner_table
        config = Config.model_validate({"learner": table, "algorithm": algorithm})
        learner = PolicyLearner(path, config, mesh=bench.mesh)
        found = record_gradients(learner)
        return learner, found, learner.update(shard)

    _, expected, _ = trained({})
    tried = [{"activation_checkpointing": mode} for mode in ("none", "full")] + [
        {"offload": True}
    ] * bench.on_gpu
    for option in tried:
        _, found, _ = trained(option)
        for name, gradient in expected.items():
            error = float((found[name].cpu() - gradient.cpu()).norm() / gradient.norm().cpu())
            assert error < 1e-5, f"{option} {name}: relative error {error:.2e}"
    learner, found, _ = trained({"lora": {"rank": 4}})
    assert all("lora_" in name for name in found), sorted(found)
    merged = weights(learner)
    moved = [
        name
        for name, rows in weights(PolicyLearner(path, bench.config, mesh=bench.mesh)).items()
        if not torch.equal(rows, merged[name])
    ]
    assert moved, "no merged weight differs from the model's"
    assert all(name.endswith("_proj.weight") for name in moved), moved
    _, _, metrics = trained({}, {"type": "ppo", "kl_reward": {"coef": 0.1}, "critic": {"lr": 0.1}})
    assert metrics["actor/reward_kl_penalty"] == 0.0, "the reference is the policy itself"
    assert 0 < metrics["critic/vf_loss"] < float("inf"), metrics
    return {"same_gradient": [next(iter(option)) for option in tried], "vf_loss": metrics["critic/vf_loss"]}


def adamw(bench: Bench) -> Figure:
    """Three fused steps on the device against torch's plain AdamW on the CPU, given the same gradients."""
    table = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 1e6, "dtype": "float32"}
    path = write_model(bench.folder / "adamw", "qwen2", True)
    learner = PolicyLearner(path, Config.model_validate({"learner": table}), mesh=bench.mesh)
    expected = {name: torch.nn.Parameter(rows.cpu()) for name, rows in weights(learner).items()}
    plain = torch.optim.AdamW(expected.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    found, groups = record_gradients(learner), uneven_groups()
    for index in range(3):
        learner.update(shard_of(groups, [[[0, 1, 2, 3, 4]]], index=index))
        for name, parameter in expected.items():
            parameter.grad = found[name].cpu()
        plain.step()
    trained = weights(learner)
    error = max(float((trained[name].cpu() - p.detach()).abs().max()) for name, p in expected.items())
    assert error < 1e-5, f"a weight is {error:.2e} off after 3 steps of lr 0.01"
    return {"largest_error": error, "tolerance": 1e-5}


def logprob_memory(bench: Bench) -> Figure:
    """Forward and backward pass of the output head, and its values against all logits of some rows."""
    num_tokens, hidden_size, vocab_size, chunk = (
        (8192, 1024, 151_936, 1024) if bench.on_gpu else (96, 32, 1000, 16)
    )
    kind = {"dtype": torch.bfloat16, "device": bench.device}
    torch.manual_seed(2)
    hidden = torch.randn(num_tokens, hidden_size, **kind).requires_grad_()
    weight = (0.05 * torch.randn(vocab_size, hidden_size, **kind)).requires_grad_()
    target = torch.randint(vocab_size, (num_tokens,), device=bench.device)
    before = bench.reset_peak()
    logprobs, _ = linear_logprobs(hidden, weight, None, target, temperature=1.0, chunk_tokens=chunk)
    logprobs.mean().backward()
    bench.synchronize()
    peak_gb = bench.peak_gb(before)
    # Four float32 chunks of logits, and the float32 gradient of the weight with a copy on its way out.
    bound_gb = 4 * vocab_size * (4 * chunk + 2 * hidden_size) / 1e9
    assert peak_gb is None or peak_gb < bound_gb, f"{peak_gb:.2f} GB above the inputs, bound {bound_gb:.2f}"
    rows = slice(chunk - 8, chunk + 8)
    expected = torch.nn.functional.linear(hidden[rows], weight).float().log_softmax(1)
    error = float((expected.gather(1, target[rows, None])[:, 0] - logprobs[rows]).detach().abs().max())
    assert error < 0.05, f"log-probs are {error:.3f} off"
    all_logits_gb = 4 * num_tokens * vocab_size / 1e9
    return {"peak_gb": peak_gb, "bound_gb": bound_gb, "all_logits_gb": all_logits_gb, "error": error}


def update(bench: Bench) -> Figure:
    """Whole updates of the shared policy: bfloat16 in its layers, float32 weights, gradients and moments."""
    learner, shard = bench.learner, policy_batch(bench)
    seen: set[torch.dtype] = set()
    block = decoder_blocks(learner._models.policy.transformer.get_decoder())[0]
    hook = block.get_submodule("mlp").register_forward_hook(
        lambda module, args, output: seen.add(output.dtype)
    )
    found, before = record_gradients(learner), weights(learner)
    learner.update(shard)
    hook.remove()
    del (
        learner._policy_steps.optimizer.step
    )  # the recording one, which would count as memory of the updates below
    assert seen == {torch.bfloat16}, f"the layers compute in {seen}"
    moments = [state["exp_avg"] for state in learner._policy_steps.optimizer._optimizer.state.values()]
    moments += [state["exp_avg_sq"] for state in learner._policy_steps.optimizer._optimizer.state.values()]
    masters = list(weights(learner).values())
    for what, tensors in (("weights", masters), ("gradients", list(found.values())), ("moments", moments)):
        kinds = {(tensor.dtype, tensor.device.type) for tensor in tensors}
        assert kinds == {(torch.float32, bench.device.type)}, f"{what} are {kinds}"
    still = [name for name, rows in weights(learner).items() if torch.equal(rows, before[name])]
    assert not still, f"the step left {still[0]} as it was ({len(still)} tensors)"
    del found, before, masters, moments
    return measure_updates(bench, shard)


def measure_updates(bench: Bench, shard: Shard) -> Figure:
    """Two more updates: packed tokens a second, and the peak of allocated memory."""
    num_tokens = sum(group.num_tokens for group in shard.groups)
    bench.reset_peak()
    bench.synchronize()
    start_s = time.monotonic()
    metrics = [bench.learner.update(shard) for _ in range(2)]
    bench.synchronize()
    tokens_per_s = 2 * num_tokens / (time.monotonic() - start_s)
    assert all(0 < each["actor/grad_norm"] < float("inf") for each in metrics), metrics
    parameters = sum(rows.numel() for rows in weights(bench.learner).values())
    return {
        "parameters": parameters,
        "packed_tokens": num_tokens,
        "tokens_per_s": tokens_per_s,
        "peak_gb": bench.peak_gb(),
        "weights_gradients_moments_gb": 16 * parameters / 1e9,
    }


def policy_batch(bench: Bench) -> Shard:
    """16 groups of 8 uneven completions, 4 groups a microbatch (about 8,700 tokens on a GPU)."""
    prompt_length, shortest, longest = (128, 128, 384) if bench.on_gpu else (6, 4, 12)
    vocab_size = int(bench.learner._models.policy.transformer.config.vocab_size)
    rng = np.random.default_rng(3)
    groups: list[TrajectoryGroup] = []
    for ordinal in range(16):
        lengths = rng.integers(shortest, longest, 8, endpoint=True)
        rows = [trajectory(rng, [1] * int(length), float(rng.random())) for length in lengths]
        for row in rows:
            row.rollout_logprobs[:] = -np.log(vocab_size)
        prompt_ids = rng.integers(0, 60, prompt_length).astype(np.int32)
        groups.append(TrajectoryGroup(ordinal, 0, prompt_ids, rows))
    return shard_of(groups, [[list(range(i, i + 4)) for i in range(0, 16, 4)]])


def snapshot(bench: Bench) -> Figure:
    """What the publisher writes from the device's shards, bit by bit against a copy rounded on the CPU."""
    learner = bench.learner
    publisher = SnapshotPublisher(
        learner, bench.config, bench.device, run=f"gpu-checks-{os.getpid()}", incarnation="check"
    )
    try:
        publisher.write(0)
        path, manifest, spans = publisher.write(1)
        verify(path, manifest)
        with map_readonly(path, manifest) as tensors:
            for entry, (name, rows), shard in zip(
                manifest.tensors, tensors, learner.named_shards(), strict=True
            ):
                copy = shard.rows.cpu().bfloat16()
                assert torch.equal(rows, copy), f"{name} is not what the device holds"
                digest = blake3(copy.flatten().view(torch.uint8).numpy().data).hexdigest()
                assert entry.digest == digest, (
                    f"{name}: digest {entry.digest[:16]}, of the copy {digest[:16]}"
                )
    finally:
        publisher.close()
    seconds = {span.name: span.end_s - span.start_s for span in spans}
    gigabytes = manifest.total_bytes / 1e9
    return {
        "gb": gigabytes,
        "write_gb_per_s": gigabytes / seconds["write"],
        "write_and_hash_gb_per_s": gigabytes / seconds["publish"],
        "folder": str(Path(path).parent),
    }


def engine(bench: Bench) -> Figure:
    """A real vLLM engine: every tensor is replaced while eight requests run."""
    require_vllm(bench)
    from conftest import MAX_MODEL_LEN, make_model, scatter  # pyright: ignore[reportMissingImports]

    from asyncrl.rollout_server.vllm_engine import VllmEngine

    bench.release_learner()
    dtype = "bfloat16" if bench.on_gpu else "float32"
    model = make_model(bench.folder / "served", tied=True)
    writer = SnapshotWriter(bench.snapshot_folder, f"gpu-checks-{os.getpid()}")
    rollout = RolloutConfig(max_num_seqs=16, kv_cache_gib=0.0625, gpu_memory_utilization=0.3)
    served = VllmEngine(
        str(bench.folder / "served"),
        rollout,
        device=bench.device.type,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        start_timeout_s=ENGINE_START_TIMEOUT_S,
    )
    try:
        snapshots = []
        for version in range(2):
            scatter(model, 50 + version)
            snapshots.append(write_snapshot(writer, model, version, dtype))
        old, across, new, num_sampled_before = asyncio.run(serve_across_update(served, snapshots))
    finally:
        for version in range(2):
            writer.unlink("check", version)
    labels = [completion.policy_versions.tolist() for completion in across]
    assert all(label == sorted(label) for label in labels), labels
    assert any(set(label) == {0, 1} for label in labels), "no request ran across the update"
    num_labelled = sum(label.count(0) for label in labels)
    assert num_labelled == num_sampled_before, (
        f"{num_labelled} tokens are labelled version 0, and {num_sampled_before} were sampled at the pause"
    )
    stale = served_error(model, old)  # the model has version 1's weights now
    errors = [served_error(model, new)]
    scatter(model, 50)
    model.to(getattr(torch, dtype)).float()
    errors.append(served_error(model, old))
    assert max(errors) < SERVED_TOLERANCE[dtype], f"log-probs are {errors} nats off"
    assert stale > 0.5, f"the two versions differ by {stale} nats only"
    return {
        "mean_error_nats": max(errors),
        "tolerance": SERVED_TOLERANCE[dtype],
        "between_versions_nats": stale,
        "sampled_before_update": num_sampled_before,
    }


def write_snapshot(
    writer: SnapshotWriter, model: Qwen2ForCausalLM, version: int, dtype: str
) -> tuple[str, Manifest]:
    """Of the model's weights, which are rounded to `dtype` here too."""
    torch_dtype = getattr(torch, dtype)
    model.to(torch_dtype).float()
    tensors = dict(model.named_parameters())
    layout = lay_out(
        ((name, tuple(t.shape), dtype, torch_dtype.itemsize) for name, t in tensors.items()), "check", version
    )
    path = writer.create(layout)
    for entry in layout.tensors:
        writer.write_rows(entry, 0, tensors[entry.name])
    return path, writer.finish(writer.digest(layout.tensors))


async def serve_across_update(
    served: VllmEngine, snapshots: list[tuple[str, Manifest]]
) -> tuple[list[Completion], list[Completion], list[Completion], int]:
    """Completions wholly of version 0, of requests that version 1 met on their way, and wholly of version 1.

    And how many tokens the second kind had sampled when the engine was paused for version 1.
    """
    numbers = itertools.count()

    async def generate(num_requests: int, max_tokens: int) -> list[Completion]:
        requests = [request(next(numbers), max_tokens) for _ in range(num_requests)]
        return await asyncio.gather(*map(served.generate, requests))

    async def replace_weights(path: str, manifest: Manifest) -> int:
        """Returns how many tokens were ever sampled before."""
        await served.pause()
        num_sampled = served.statistics().num_sampled_tokens
        await served.apply(path, manifest)
        await served.resume()
        return num_sampled

    try:
        await served.start()
        await replace_weights(*snapshots[0])
        old = await generate(4, 32)
        async with asyncio.TaskGroup() as tasks:
            across = tasks.create_task(generate(8, 300))
            short = await generate(1, 9)  # when it ends, the others have made as many steps
            num_sampled = await replace_weights(*snapshots[1])
        num_others = sum(len(completion.token_ids) for completion in old + short)
        return old, across.result(), await generate(4, 32), num_sampled - num_others
    finally:
        await served.close()


SERVED_PROMPT = list(range(20, 50))


def request(number: int, max_tokens: int) -> GenerationRequest:
    from asyncrl.rollout_server.engine import GenerationRequest

    prompt_ids = np.array(SERVED_PROMPT, np.int32)
    return GenerationRequest(f"r{number}", prompt_ids, seed=number, sampling=SamplingSpec(1.0, max_tokens))


def served_error(model: Qwen2ForCausalLM, completions: list[Completion]) -> float:
    """Mean distance between the served log-probs and the transformers model's in float32, in nats."""
    distances: list[np.ndarray] = []
    for completion in completions:
        ids = torch.tensor([[*SERVED_PROMPT, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(SERVED_PROMPT) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, len(SERVED_PROMPT) :, None])[:, 0].numpy()
        distances.append(np.abs(expected - completion.logprobs))
    return float(np.concatenate(distances).mean())


def train(bench: Bench) -> Figure:
    """The whole road: `asyncrl train configs/tiny.yaml`, cut to some versions."""
    require_vllm(bench)
    if bench.on_gpu and torch.cuda.device_count() < 2:
        raise Skipped("the learner and the rollout server need a GPU each, and there is one")
    bench.release_learner()
    num_versions = 20 if bench.on_gpu else 3
    command = [sys.executable, "-m", "asyncrl.cli", "train", "configs/tiny.yaml", "run.name=train"]
    command += [
        f"run.dir={bench.folder}",
        f"weight_sync.dir={bench.folder}",
        f"learner.max_versions={num_versions}",
    ]
    command += [f"resources.devices={bench.device.type}"]
    start_s = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TRAIN_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr.strip().splitlines()[-1:]
    lines = (bench.folder / "train" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == num_versions, f"{len(lines)} versions of {num_versions} are in metrics.jsonl"
    scores = [json.loads(line)["critic/score/mean"] for line in lines]
    return {
        "versions": num_versions,
        "first_score": scores[0],
        "last_score": scores[-1],
        "run_s": time.monotonic() - start_s,
    }


def require_vllm(bench: Bench) -> None:
    if bench.quick:
        raise Skipped("--quick")
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed")
    if "asyncrl" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise Skipped(
            "asyncrl is not installed, so vLLM does not find its plug-in: pip install --no-deps -e ."
        )


CHECKS: dict[str, Callable[[Bench], Figure]] = {
    "environment": environment,
    "gpu_count": gpu_count,
    "collectives": collectives,
    "gradients_float32": lambda bench: gradients(bench, "float32"),
    "gradients_bfloat16": lambda bench: gradients(bench, "bfloat16"),
    "attention": attention,
    "options": options,
    "adamw": adamw,
    "logprob_memory": logprob_memory,
    "update": update,
    "snapshot": snapshot,
    "engine": engine,
    "train": train,
}


def run_check(name: str, bench: Bench) -> bool:
    """Prints the check's line. Returns False when it failed."""
    start_s = time.monotonic()
    line: dict[str, Any] = {"name": name, "ok": True}
    try:
        line["figure"] = CHECKS[name](bench)
    except Skipped as reason:
        line |= {"ok": None, "skipped": str(reason)}
    except Exception as raised:
        error = first_cause(raised) if isinstance(raised, BaseExceptionGroup) else raised
        frame = traceback.extract_tb(error.__traceback__)[-1]
        last = traceback.format_exception_only(error)[-1].strip()
        line |= {"ok": False, "error": last, "at": f"{Path(frame.filename).name}:{frame.lineno}"}
    print(json.dumps(line | {"seconds": round(time.monotonic() - start_s, 2)}), flush=True)
    return line["ok"] is not False


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks of the GPU paths; one JSON line a check.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="leave out the checks that start vLLM")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-checks-") as folder:
        bench = Bench(torch.device(arguments.device), Path(folder), arguments.quick)
        passed = [run_check(name, bench) for name in arguments.only]
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
