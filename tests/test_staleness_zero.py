"""With max_staleness 0 an asynchronous run is the synchronous algorithm, bit for bit.

The same five versions are made twice from the same engine and learner classes: once through coordinator,
stream and rollout server, once by a plain loop. Then each version is checked against transformers' padded
forward pass on the recorded tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import MAX_MODEL_LEN, VOCAB_SIZE, ServedModel
from memory_dataset import dataset_of

from asyncrl.algorithms.advantages.estimators import trajectory_advantages
from asyncrl.config import Config, load_config, shared_digest
from asyncrl.config.advantages import OutcomeAdvantages
from asyncrl.coordinator.batches import plan_batch
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.envs.dataset import Dataset, load_tokenizer
from asyncrl.envs.env import Answer, RewardOutcome, SingleTurnEnv
from asyncrl.envs.order import DataOrder, request_seed
from asyncrl.learner.experience import receive_shard
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.publish import SnapshotPublisher
from asyncrl.learner.update import PolicyLearner
from asyncrl.rollout_server.group_runner import run_group
from asyncrl.rollout_server.server import RolloutServer, sampling_spec
from asyncrl.run_directory import RunDirectory, run_path
from asyncrl.stream.codec import Limits
from asyncrl.stream.connections import BlockingConnection, Connection
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.messages import Lease, RankHello, RankWelcome
from asyncrl.stream.sockets import Listener
from asyncrl.types import Shard, Status, TrajectoryGroup
from asyncrl.weight_sync.shm import ShmTransport
from asyncrl.weight_sync.snapshot import remove_all

pytestmark = pytest.mark.engine

NUM_VERSIONS = 5
NUM_ROWS = 12
RUN = "staleness-zero"


@dataclass
class Version:
    """What one version was trained on and what came of it."""

    groups: list[TrajectoryGroup]
    advantages: list[list[float]]
    weights_before: dict[str, torch.Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


class RecordingLearner(PolicyLearner):
    """A PolicyLearner that keeps what passed through it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.versions: list[Version] = []

    def weights(self) -> dict[str, torch.Tensor]:
        return {shard.name: shard.rows.clone() for shard in self.named_shards()}

    def update(self, shard: Shard) -> dict[str, float]:
        batch = receive_shard(shard, torch.device("cpu")).batch
        advantages = trajectory_advantages(OutcomeAdvantages(), batch.rewards, batch.group_index)
        sizes = [len(rewards) for rewards in shard.plan.rewards]
        of_groups = [group.tolist() for group in advantages.split(sizes)]
        self.versions.append(Version(shard.groups, of_groups, self.weights()))
        self.versions[-1].metrics = super().update(shard)
        return self.versions[-1].metrics


class EvenShare:
    """Some reward that differs between completions: the share of even token numbers."""

    needs_group = False
    num_finished = 0

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        numbers = [int(word[1:]) for word in answer.text.split(";") if word]
        share = sum(n % 2 == 0 for n in numbers) / len(numbers) if numbers else 0.0
        return RewardOutcome(share, Status.SCORED)

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        raise AssertionError("it needs no group")


def make_config(tmp_path: Path) -> Config:
    return load_config(
        None,
        [
            f"run.dir={tmp_path}",
            "run.name=zero",
            "max_staleness=0",
            "rollout.group_size=4",
            "rollout.max_completion_tokens=12",
            "rollout.temperature=0.9",
            "learner.prompts_per_batch=3",
            f"learner.max_versions={NUM_VERSIONS}",
            "learner.max_tokens_per_microbatch=120",
            "learner.lr=0.003",
        ],
    )


def make_dataset() -> Dataset:
    rng = np.random.default_rng(5)
    prompts = [
        rng.integers(4, VOCAB_SIZE, int(rng.integers(3, 40))).astype(np.int32) for _ in range(NUM_ROWS)
    ]
    return dataset_of([{"prompt": "", "answer": ""}] * NUM_ROWS, prompts)


def limits() -> Limits:
    return Limits(
        vocab_size=VOCAB_SIZE, group_size=4, max_prompt_tokens=MAX_MODEL_LEN, max_completion_tokens=12
    )


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield make_mesh("cpu", 1)
    dist.destroy_process_group()


def run_asynchronously(served: ServedModel, config: Config, learner: RecordingLearner) -> None:
    """Coordinator and rollout server in the engine's event loop, the learner loop in this thread."""
    dataset = make_dataset()
    listening = threading.Event()
    address: list[str] = []

    async def coordinate() -> None:
        directory = RunDirectory.create(config)
        async with Listener("127.0.0.1", 0, max_message_bytes=1 << 24, heartbeat_s=10.0) as listener:
            known = limits()
            known.run, known.incarnation, known.newest_version = RUN, "zero1", -1
            mailbox = Mailbox(listener, known, max_message_bytes=1 << 24)
            address.append(listener.address)
            listening.set()
            try:
                async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                    tasks.create_task(Coordinator(config, dataset, mailbox, directory).run())
                    tasks.create_task(serve_rollouts(listener.address))
            finally:
                directory.close()

    async def serve_rollouts(where: str) -> None:
        envelope = Envelope("rollout-server-1", max_message_bytes=1 << 24)
        async with Connection(where, envelope, limits(), heartbeat_s=10.0, connect_s=10.0) as connection:
            env = SingleTurnEnv(load_tokenizer(served.folder))
            server = RolloutServer(
                config, served.engine, connection, env=env, rewards=EvenShare(), transport=ShmTransport()
            )
            await server.run()

    failure: list[BaseException] = []

    def in_background() -> None:
        try:
            served.await_(coordinate())
        except BaseException as error:
            failure.append(error)

    background = threading.Thread(target=in_background)
    background.start()
    assert listening.wait(20)
    envelope = Envelope("learner-0", max_message_bytes=1 << 24)
    with BlockingConnection(address[0], envelope, limits(), heartbeat_s=10.0, connect_s=10.0) as connection:
        connection.send(RankHello(shared_digest(config), 0, 1))
        assert isinstance(connection.recv(10.0).body, RankWelcome)
        publisher = SnapshotPublisher(
            learner, config, torch.device("cpu"), run=RUN, incarnation=envelope.incarnation
        )
        try:
            loop = LearnerLoop(config, learner, connection, publisher, run_path(config))
            loop.run()
            loop.say_goodbye()
        finally:
            publisher.close()
    background.join(timeout=60)
    assert not failure, failure


def run_synchronously(served: ServedModel, config: Config, learner: RecordingLearner) -> None:
    """generate, score, train, publish: neither coordinator nor stream nor server loop."""
    dataset = make_dataset()
    order = DataOrder(config.seed, dataset.sizes, dataset.weights)
    env = SingleTurnEnv(load_tokenizer(served.folder))
    publisher = SnapshotPublisher(learner, config, torch.device("cpu"), run=RUN, incarnation="zero2")

    async def generate(ordinals: range) -> list[TrajectoryGroup]:
        groups = []
        for ordinal in ordinals:
            _, row = order.place(ordinal)
            seeds = [request_seed(config.seed, ordinal, sample, 0) for sample in range(4)]
            lease = Lease(ordinal, 0, seeds, {})
            groups.append(
                await run_group(
                    lease,
                    dataset[row].token_ids,
                    env=env,
                    engine=served.engine,
                    rewards=EvenShare(),
                    sampling=sampling_spec(config),
                )
            )
        return groups

    try:
        for version in range(NUM_VERSIONS):
            path, manifest, _ = publisher.write(version)
            served.await_(served.update(path, manifest))
            groups = served.await_(generate(range(3 * version, 3 * version + 3)))
            plan = plan_batch(version, groups, num_ranks=1, max_tokens=120)
            learner.update(Shard(plan, 0, [groups[p] for p in plan.positions_of(0)]))
    finally:
        publisher.close()


@pytest.fixture
def both(
    tied: ServedModel, mesh: Any, tmp_path: Path
) -> Iterator[tuple[RecordingLearner, RecordingLearner, Config]]:
    config = make_config(tmp_path)
    learners = [RecordingLearner(tied.folder, config, mesh=mesh) for _ in range(2)]
    try:
        run_asynchronously(tied, config, learners[0])
        run_synchronously(tied, config, learners[1])
        yield learners[0], learners[1], config
    finally:
        remove_all(config.weight_sync.dir, RUN)


def test_staleness_0_is_bitwise_the_synchronous_loop_and_agrees_with_transformers(
    both: tuple[RecordingLearner, RecordingLearner, Config], tied: ServedModel
):
    # Mutations: leasing before the version is committed; a seed that depends on the server; packing in order
    # of arrival; log-probs without temperature; a loss normalised by microbatch.
    asynchronous, synchronous, config = both
    assert len(asynchronous.versions) == len(synchronous.versions) == NUM_VERSIONS
    for index, (a, s) in enumerate(zip(asynchronous.versions, synchronous.versions, strict=True)):
        assert_same_groups(a.groups, s.groups, index)
        assert a.advantages == s.advantages
        assert any(value != 0 for group in a.advantages for value in group)
        assert timeless(a.metrics) == timeless(s.metrics)
        assert_same_weights(a.weights_before, s.weights_before)
        assert_transformers_agrees(tied.folder, a, config)
    assert_same_weights(asynchronous.weights(), synchronous.weights())
    moved = asynchronous.versions[0].weights_before
    assert all(not torch.equal(moved[name], rows) for name, rows in asynchronous.weights().items())


def assert_same_groups(a: list[TrajectoryGroup], s: list[TrajectoryGroup], index: int) -> None:
    assert [g.ordinal for g in a] == [g.ordinal for g in s] == [3 * index, 3 * index + 1, 3 * index + 2]
    for one, other in zip(a, s, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        for t, u in zip(one.trajectories, other.trajectories, strict=True):
            assert t.token_ids.tolist() == u.token_ids.tolist()
            assert t.rollout_logprobs.tobytes() == u.rollout_logprobs.tobytes()
            assert t.reward == u.reward
            assert set(t.policy_versions.tolist()) <= {index}
            assert t.loss_mask.all()


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}


def assert_same_weights(a: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
    assert a.keys() == s.keys()
    assert [name for name in a if not torch.equal(a[name], s[name])] == []


def assert_transformers_agrees(folder: Path, version: Version, config: Config) -> None:
    """Row by row, padded: the gradient norm to 1e-5 relative, the engine's log-probs to 5e-5 (1.1e-5 is seen with
    AVX-512)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(version.weights_before, strict=False)
    model.tie_weights()
    rows = [(g.prompt_ids, t) for g in version.groups for t in g.trajectories]
    advantages = torch.tensor([a for group in version.advantages for a in group])
    longest = max(len(prompt) + len(t) for prompt, t in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    attention = torch.zeros_like(ids)
    completion = torch.zeros(len(rows), longest, dtype=torch.bool)
    rollout = torch.zeros(len(rows), longest)
    for i, (prompt, t) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(t)
        ids[i, :end] = torch.from_numpy(np.concatenate([prompt, t.token_ids]))
        attention[i, :end] = 1
        completion[i, start:end] = True
        rollout[i, start:end] = torch.from_numpy(t.rollout_logprobs.copy())
    logits = model(input_ids=ids, attention_mask=attention).logits / config.rollout.temperature
    logprobs = torch.zeros(len(rows), longest)
    logprobs[:, 1:] = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    assert (logprobs - rollout)[completion].abs().max().item() < 5e-5
    weight = torch.exp(logprobs.detach() - rollout).clamp(max=2.0)
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(weight * ratio * advantages[:, None])[completion].sum() / completion.sum()
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    assert version.metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
