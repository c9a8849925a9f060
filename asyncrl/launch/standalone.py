"""`asyncrl rollout-server CONFIG --connect HOST:PORT`: one rollout server, started by hand."""

from __future__ import annotations

import asyncio
import os
import sys

from asyncrl.config import Config
from asyncrl.launch.prepare import fetch_model
from asyncrl.launch.resources import available_cores, count_gpus, place_processes
from asyncrl.stream.sockets import parse_address


def run_standalone_server(config: Config, address: str) -> None:
    """Serves on the cores that `asyncrl train` would give its first server, and on the GPUs that are visible.

    Raises the cause of its end. Thread counts are read when torch and OpenMP load, so this process replaces itself with one that has them.
    """
    parse_address(address)
    one = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_servers": 1})})
    placement = place_processes(one, cores=available_cores(), num_gpus=0).rollout_servers[0]
    missing = {k: v for k, v in placement.environment().items() if os.environ.get(k) != v}
    if missing and "ASYNCRL_PLACED" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "asyncrl.cli", *sys.argv[1:]],
            os.environ | missing | {"ASYNCRL_PLACED": "1"},
        )
    os.sched_setaffinity(0, placement.cores)
    model_path = asyncio.run(fetch_model(config.model))
    from asyncrl.launch.server_process import run_rollout_server

    run_rollout_server(config, str(model_path), address, device="cuda" if count_gpus(config) else "cpu")
