"""Model FLOPs utilisation as verl counts it, so that runs of both can be laid side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedConfig

PEAK_FLOPS_PER_S = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40": 181e12,
    "L20": 119.5e12,
}
"""Dense bfloat16 of a device, by a part of its name; the makers' figures."""


def peak_flops_per_s(device_name: str) -> float | None:
    """None for a device that is not known: then there is no utilisation to report."""
    return next((flops for part, flops in PEAK_FLOPS_PER_S.items() if part in device_name), None)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """verl's estimate of a forward and backward pass (`flops_counter.py`, dense models).

    6 x parameters x tokens + 12 x head size x heads x layers x sum of squared lengths, where the parameters are those
    of the blocks' matrices and twice the embedding, and a sequence is a prompt with its completion, whole: a prompt
    that a group shares counts once a trajectory here, though the packed row holds it once.
    """

    parameters: float
    attention: float
    """12 x head size x heads x layers."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelFlops:
        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        keys = getattr(config, "num_key_value_heads", None) or heads
        head = getattr(config, "head_dim", None) or hidden // heads
        matrices = (
            3 * hidden * config.intermediate_size + hidden * head * (heads + 2 * keys) + heads * head * hidden
        )
        return cls(layers * matrices + 2.0 * config.vocab_size * hidden, 12.0 * head * heads * layers)

    def count(self, lengths: Iterable[int]) -> float:
        """FLOPs of sequences of these lengths, forward and backward."""
        lengths = list(lengths)
        return 6.0 * self.parameters * sum(lengths) + self.attention * sum(length**2 for length in lengths)
