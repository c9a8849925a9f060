"""asyncrl: asynchronous reinforcement learning for language models.

The names below are loaded when they are first used: importing asyncrl takes milliseconds and loads neither
torch nor vllm.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config import Config, load_config
    from asyncrl.errors import AsyncRLError, ConfigError
    from asyncrl.trainer import Trainer, TrainResult
    from asyncrl.types import Prompt, Trajectory, TrajectoryGroup

_HOME = {
    "AsyncRLError": "asyncrl.errors",
    "Config": "asyncrl.config",
    "ConfigError": "asyncrl.errors",
    "Prompt": "asyncrl.types",
    "TrainResult": "asyncrl.trainer",
    "Trainer": "asyncrl.trainer",
    "Trajectory": "asyncrl.types",
    "TrajectoryGroup": "asyncrl.types",
    "load_config": "asyncrl.config",
}

__all__ = [
    "AsyncRLError",
    "Config",
    "ConfigError",
    "Prompt",
    "TrainResult",
    "Trainer",
    "Trajectory",
    "TrajectoryGroup",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
