"""The coefficient of the KL penalty: fixed, or steered towards a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncrl.config.losses import KlControllerConfig


class KlController(Protocol):
    coefficient: float

    def update(self, kl: float, num_samples: int) -> None:
        """After a batch: `kl`, its mean KL to the reference (over trajectories, of each one's mean over tokens, in
        most peers); `num_samples`, its trajectories."""
        ...


@dataclass(slots=True)
class FixedKlController:
    coefficient: float

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing changes."""


@dataclass(slots=True)
class AdaptiveKlController:
    """coefficient *= 1 + error * num_samples / horizon, error = kl / target - 1 cut to [-0.2, 0.2].

    Proportional control in log space: arXiv:1909.08593. The state to checkpoint is `coefficient`; every
    rank must see the same kl (all-reduced), or the ranks drift apart.
    """

    coefficient: float
    target: float
    horizon: float

    def update(self, kl: float, num_samples: int) -> None:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_samples / self.horizon


def build_kl_controller(config: KlControllerConfig) -> KlController:
    if config.type == "fixed":
        return FixedKlController(config.coef)
    return AdaptiveKlController(config.coef, target=config.target, horizon=config.horizon)
