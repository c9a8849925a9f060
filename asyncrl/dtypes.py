"""What `auto` dtypes stand for. Named as torch names them, but torch-free: `asyncrl check` asks too."""

from __future__ import annotations

from asyncrl.config import Config, LearnerConfig


def compute_dtype(learner: LearnerConfig, device: str) -> str:
    """The dtype of forward passes on `device` ("cpu" or "cuda"), the engine's as well as the learner's."""
    if learner.dtype != "auto":
        return learner.dtype
    return "bfloat16" if device == "cuda" else "float32"


def publish_dtype(config: Config, device: str) -> str:
    """The dtype of published weights: as configured, or the compute dtype."""
    if config.weight_sync.dtype != "auto":
        return config.weight_sync.dtype
    return compute_dtype(config.learner, device)
