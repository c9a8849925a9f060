"""`asyncrl rollout-server CONFIG --connect HOST:PORT`: one rollout server, started by hand."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys

from asyncrl.config import Config
from asyncrl.launch.model_facts import check_length
from asyncrl.launch.preflight import check_engine, max_sequence_tokens
from asyncrl.launch.prepare import fetch_model, fetch_reward_models
from asyncrl.launch.resources import available_cores, place_one_server, visible_gpus
from asyncrl.stream.sockets import parse_address


def run_standalone_server(config: Config, address: str) -> None:
    """Serves on the rollout servers' share of this node's cores, and on the first GPUs that are visible.

    Raises the cause of its end. Thread counts are read when torch and OpenMP load, so this process replaces
    itself with one that has them.
    """
    parse_address(address)
    gpus = visible_gpus(config)
    device = "cuda" if gpus else "cpu"
    check_engine(config, device)
    placement = place_one_server(config, cores=available_cores(), gpus=gpus)
    missing = {k: v for k, v in placement.environment().items() if os.environ.get(k) != v}
    if missing and "ASYNCRL_PLACED" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "asyncrl.cli", *sys.argv[1:]],
            os.environ | missing | {"ASYNCRL_PLACED": "1"},
        )
    os.sched_setaffinity(0, placement.cores)
    asyncio.run(fetch_reward_models(config))
    model_path = asyncio.run(fetch_model(config.model))
    check_length(model_path, max_sequence_tokens(config))
    from asyncrl.launch.server_process import run_rollout_server

    # The coordinator knows a server by its name, and process ids repeat between containers.
    name = f"rollout-server-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    run_rollout_server(config, str(model_path), address, name=name, device=device)
