"""What TRL's side of vs_trl.py has to train, from the configuration of asyncrl's side. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.envs.dataset import load_dataset, load_tokenizer
from asyncrl.envs.order import DataOrder
from asyncrl.models.source import resolve_model


@dataclass(frozen=True, slots=True)
class TrlSpec:
    """What to train."""

    model_path: str
    rows: list[dict[str, Any]]
    """The prompts of every step, in order."""
    prompt_ids: list[list[int]]
    """Tokens of each row's prompt as asyncrl has them; TRL's must be the same."""
    reward: str
    group_size: int
    prompts_per_batch: int
    max_completion_tokens: int
    temperature: float
    lr: float
    betas: tuple[float, float]
    max_grad_norm: float
    num_steps: int
    per_device_batch_size: int
    """Completions of one forward-backward; gradients accumulate over the rest of the batch."""
    num_threads: int
    seed: int
    output_dir: str

    def trainer_arguments(self) -> dict[str, Any]:
        """The arguments of GRPOConfig that differ from its defaults, but for the output folder."""
        accumulation = self.prompts_per_batch * self.group_size // self.per_device_batch_size
        return {
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,  # on by default; off is faster, and the memory suffices
            "num_generations": self.group_size,
            "per_device_train_batch_size": self.per_device_batch_size,
            "gradient_accumulation_steps": accumulation,  # one generation and one optimizer step a batch
            "max_completion_length": self.max_completion_tokens,
            "temperature": self.temperature,
            "beta": 0.0,
            "scale_rewards": "none",
            "loss_type": "dapo",  # the mean over all tokens of the batch
            "learning_rate": self.lr,
            "lr_scheduler_type": "constant",
            "adam_beta1": self.betas[0],
            "adam_beta2": self.betas[1],
            "max_grad_norm": self.max_grad_norm,
            "max_steps": self.num_steps,
            "shuffle_dataset": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": self.seed,
        }


def same_work(
    config: Config, *, num_steps: int, per_device_batch_size: int, num_threads: int, output_dir: Path
) -> TrlSpec:
    """What asyncrl does with `config`, for TRL: the same model and prompts, in asyncrl's data order."""
    model_path = resolve_model(config.model)
    dataset = load_dataset(config.data.train, config.data, config.seed, load_tokenizer(model_path))
    order = DataOrder(config.seed, dataset.sizes, dataset.weights)
    num_prompts = num_steps * config.learner.prompts_per_batch
    kept = [dataset[order.place(ordinal)[1]] for ordinal in range(num_prompts)]
    return TrlSpec(
        model_path=str(model_path),
        rows=[row.row for row in kept],
        prompt_ids=[row.token_ids.tolist() for row in kept],
        reward=config.reward[0].name,
        group_size=config.rollout.group_size,
        prompts_per_batch=config.learner.prompts_per_batch,
        max_completion_tokens=config.rollout.max_completion_tokens,
        temperature=config.rollout.temperature,
        lr=config.learner.lr,
        betas=config.learner.betas,
        max_grad_norm=config.learner.max_grad_norm,
        num_steps=num_steps,
        per_device_batch_size=per_device_batch_size,
        num_threads=num_threads,
        seed=config.seed,
        output_dir=str(output_dir),
    )
