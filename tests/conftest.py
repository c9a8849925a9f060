"""Real vLLM engines shared by tests, and the tiny models that they serve.

Two engines: one model with tied embeddings (for the whole session), one without (for one module). Their
weights change from test to test: a test that compares numbers publishes its own version first.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several engines, other tests, few cores

import numpy as np
import pytest

from asyncrl.config import RolloutConfig
from asyncrl.rollout_server.engine import GenerationRequest
from asyncrl.rollout_server.vllm_engine import VllmEngine
from asyncrl.types import SamplingSpec
from asyncrl.weight_sync.manifest import Manifest, lay_out
from asyncrl.weight_sync.snapshot import SnapshotWriter, remove_all

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

T = TypeVar("T")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with engines run one after another in one of pytest-xdist's processes, the rest in the others."""
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.xdist_group("engine"))


VOCAB_SIZE = 300  # not a multiple of 64: vLLM pads it
EOS_TOKEN_IDS = (2, 7)
MAX_MODEL_LEN = 384
BLOCK_SIZE = 32


def make_model(folder: Path, *, tied: bool) -> Qwen2ForCausalLM:
    """A random Qwen2 of 0.1M parameters that hardly ever samples an EOS token, saved in `folder`.

    Its generation_config.json would spoil every log-prob if an engine took its sampling defaults.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_IDS[0],
        pad_token_id=0,
    )
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(config).float().eval()
    scatter(model, 12)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_p=0.5,
        top_k=3,
        repetition_penalty=1.3,
        eos_token_id=list(EOS_TOKEN_IDS),
    )
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return model


def make_tokenizer(folder: Path) -> None:
    """Token 42 is the text "t42;"."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {f"t{i};": i for i in range(4, VOCAB_SIZE)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)


def scatter(model: Qwen2ForCausalLM, seed: int) -> None:
    """Changes every weight, so that log-probs move by whole nats; logits have a deviation of about 3."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.375 * noise)
                parameter[list(EOS_TOKEN_IDS)] = 0
            else:
                parameter.copy_(0.15 * noise)


@dataclass
class ServedModel:
    """An engine, the model as transformers computes it, and how to publish the one to the other."""

    engine: VllmEngine
    hf_model: Qwen2ForCausalLM
    folder: Path
    snapshots: SnapshotWriter
    await_: Callable[..., Any]
    """Runs a coroutine on the engine's event loop and returns its result."""
    versions: Iterator[int]
    request_numbers: Iterator[int]

    def write_snapshot(
        self, tensors: dict[str, torch.Tensor] | None = None, *, dtype: str = "float32"
    ) -> tuple[str, Manifest]:
        """The next version's finished file: of `tensors`, or of the transformers model's present weights."""
        import torch

        named = list((tensors or dict(self.hf_model.named_parameters())).items())
        itemsize = getattr(torch, dtype).itemsize
        layout = lay_out(
            ((name, tuple(p.shape), dtype, itemsize) for name, p in named), "t", next(self.versions)
        )
        path = self.snapshots.create(layout)
        for entry, (_, parameter) in zip(layout.tensors, named, strict=True):
            self.snapshots.write_rows(entry, 0, parameter)
        return path, self.snapshots.finish(self.snapshots.digest(layout.tensors))

    async def update(self, path: str, manifest: Manifest) -> None:
        """pause -> apply -> resume; resumes too when `apply` refuses."""
        await self.engine.pause()
        try:
            await self.engine.apply(path, manifest)
        finally:
            await self.engine.resume()

    def publish(self, *, seed: int | None = None) -> int:
        """Serves new weights (scattered by `seed`, or the transformers model's present ones)."""
        if seed is not None:
            scatter(self.hf_model, seed)
        path, manifest = self.write_snapshot()
        self.await_(self.update(path, manifest))
        self.snapshots.unlink("t", manifest.version)
        return manifest.version

    def request(
        self,
        prompt_ids: list[int],
        *,
        seed: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        stop: tuple[str, ...] = (),
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"r{next(self.request_numbers)}",
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            seed=seed,
            sampling=SamplingSpec(temperature, max_tokens, stop),
        )

    def generate(self, *requests: GenerationRequest) -> list[Any]:
        """All at once."""

        async def together() -> list[Any]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.await_(together())

    def logprobs(
        self, prompt_ids: list[int], token_ids: np.ndarray, *, temperature: float = 1.0
    ) -> torch.Tensor:
        """[T] of each completion token under the transformers model's full distribution."""
        import torch

        ids = torch.tensor([[*prompt_ids, *token_ids.tolist()]])
        with torch.no_grad():
            logits = self.hf_model(ids).logits[0, len(prompt_ids) - 1 : -1] / temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """An event loop in a thread of its own: engines outlive the loop of any one test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=500)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    loop.close()


def serve(folder: Path, await_: Callable[..., Any], *, tied: bool) -> Iterator[ServedModel]:
    """Starts an engine on a model made in `folder`, at version 0 and open; closes it afterwards."""
    hf_model = make_model(folder, tied=tied)
    rollout = RolloutConfig(max_num_seqs=16, kv_cache_gib=0.0625, block_size=BLOCK_SIZE)

    async def make() -> VllmEngine:
        return VllmEngine(
            str(folder),
            rollout,
            device="cpu",
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            update_timeout_s=60,
        )

    engine = await_(make())
    run_id = f"test{os.getpid()}-{'tied' if tied else 'untied'}"
    snapshots = SnapshotWriter("/dev/shm", run_id)
    served = ServedModel(engine, hf_model, folder, snapshots, await_, itertools.count(), itertools.count())
    try:
        await_(engine.start())
        served.publish()
        yield served
    finally:
        processes = list(engine._processes)
        await_(engine.close())
        remove_all("/dev/shm", run_id)
        assert not [process for process in processes if process.is_running()]


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory, engine_loop: Callable[..., Any]) -> Iterator[ServedModel]:
    """The engine whose model shares embedding and output head."""
    yield from serve(tmp_path_factory.mktemp("tied"), engine_loop, tied=True)


@pytest.fixture(scope="module")
def untied(
    tmp_path_factory: pytest.TempPathFactory, engine_loop: Callable[..., Any]
) -> Iterator[ServedModel]:
    """An engine whose model has an output head of its own. Its module's last test may kill it."""
    yield from serve(tmp_path_factory.mktemp("untied"), engine_loop, tied=False)
