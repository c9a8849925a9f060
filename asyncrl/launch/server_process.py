"""The process of one rollout server: starts its engine and reward workers, meets the coordinator, serves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from asyncrl.config import Config
from asyncrl.dtypes import compute_dtype
from asyncrl.envs.dataset import load_tokenizer
from asyncrl.envs.env import SingleTurnEnv
from asyncrl.envs.weighted_rewards import WeightedRewards
from asyncrl.launch.preflight import max_sequence_tokens
from asyncrl.launch.prepare import message_limits
from asyncrl.rollout_server.server import RolloutServer
from asyncrl.rollout_server.vllm_engine import VllmEngine
from asyncrl.stream.connections import Connection
from asyncrl.stream.envelope import Envelope
from asyncrl.weight_sync.shm import ShmTransport


def run_rollout_server(config: Config, model_path: str, address: str, *, name: str, device: str) -> None:
    """Serves until the coordinator says Stop. SIGTERM and Ctrl-C end the engine first. Raises the cause.

    `name`: what the coordinator knows this server by; no other server of the run may have it.
    """
    try:
        asyncio.run(_run(config, model_path, address, name, device))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def _run(config: Config, model_path: str, address: str, name: str, device: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    engine = make_engine(config, model_path, device)
    connecting = Connection(
        address,
        Envelope(name, max_message_bytes=config.stream.max_message_bytes),
        message_limits(config, Path(model_path)),
        heartbeat_s=config.timeouts.heartbeat_s,
        connect_s=config.timeouts.connect_s,
    )
    try:
        # Connected before the engine starts: a wrong address shows in seconds, not after a minute.
        async with connecting as connection, rewards_of(config) as rewards:
            await engine.start()
            server = RolloutServer(
                config,
                engine,
                connection,
                env=SingleTurnEnv(load_tokenizer(model_path)),
                rewards=rewards,
                transport=ShmTransport(),
            )
            await server.run()
    finally:
        await engine.close()


def make_engine(config: Config, model_path: str, device: str) -> VllmEngine:
    """The engine that the config asks for, not started yet."""
    return VllmEngine(
        model_path,
        config.rollout,
        device=device,
        dtype=compute_dtype(config.learner, device),
        max_model_len=max_sequence_tokens(config),
        start_timeout_s=config.timeouts.engine_start_s,
        update_timeout_s=config.timeouts.sync_s,
    )


def rewards_of(config: Config) -> WeightedRewards:
    """The config's rewards, not started yet: one process a core of this server, for each."""
    return WeightedRewards(config, num_workers=len(os.sched_getaffinity(0)))
