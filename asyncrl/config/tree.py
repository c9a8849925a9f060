"""The whole tree, and the combinations of keys that it refuses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from asyncrl.config.advantages import OutcomeAdvantages
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import CheckpointConfig, LearnerConfig
from asyncrl.config.losses import LossConfig, ValueLossConfig
from asyncrl.config.reward import RewardConfig
from asyncrl.config.rollout import DataConfig, EvalConfig, RolloutConfig
from asyncrl.config.system import (
    ResourcesConfig,
    RunConfig,
    StreamConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)
from asyncrl.config.table import Table, not_built, tables_by_name

Loss = TypeVar("Loss", LossConfig, ValueLossConfig)


class Config(Table):
    """The whole tree. `asyncrl check CONFIG` prints what it amounts to."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Rollout servers and learner on devices of their own, or both on the same ones."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts the processes."""
    model: str = "tiny"
    """A Hugging Face name, a folder, or `tiny`: 0.4M parameters, made and warmed up on the spot."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """A recipe by name (`grpo`), or a table {type: grpo, ...}."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: no token older than S versions trains (except under `over_age: keep`)."""
    over_age: Literal["mask", "keep", "wait", "drop"] = "mask"
    """What happens to tokens past the bound: left out of the loss, or trained with importance weights."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order and every request."""
    data: DataConfig = DataConfig()
    reward: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (RewardConfig(name="exact_match"),)
    """Name of one reward (see reward.name), or a list of rewards (names or tables) that are added up."""
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    stream: StreamConfig = StreamConfig()
    resources: ResourcesConfig = ResourcesConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @field_validator("algorithm", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @field_validator("reward", mode="before")
    @classmethod
    def _rewards_by_name(cls, value: Any) -> Any:
        return tables_by_name(value, "name")

    @field_validator("mode")
    @classmethod
    def _mode_built(cls, value: str) -> str:
        return not_built(value, ("disaggregated",))

    @field_validator("launcher")
    @classmethod
    def _launcher_built(cls, value: str) -> str:
        return not_built(value, ("local",))

    @field_validator("over_age")
    @classmethod
    def _over_age_built(cls, value: str) -> str:
        return not_built(value, ("mask", "keep"))

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        self._check_group_size()
        self._check_overlong()
        self._check_kl_horizon()
        self._check_critic_warmup()
        if self.learner.lora is not None and self.algorithm.reference.refresh_every:
            raise ValueError(
                f"algorithm.reference.refresh_every {self.algorithm.reference.refresh_every}: with learner.lora the "
                "reference has no adapters that could take the policy's; set it to 0"
            )
        if self.rollouts_per_group > self.rollout.max_num_seqs:
            raise ValueError(
                f"rollout.group_size {self.rollout.group_size} exceeds rollout.max_num_seqs "
                f"{self.rollout.max_num_seqs}; a group must fit the engine at once"
            )
        if self.learner.minibatches > self.learner.prompts_per_batch:
            raise ValueError(
                f"learner.minibatches {self.learner.minibatches} exceeds learner.prompts_per_batch "
                f"{self.learner.prompts_per_batch}; a group stays whole, so a mini-batch has at least one"
            )
        self._check_evaluation()
        self._check_supervised()
        in_flight = self.rollout.max_groups_in_flight
        if in_flight != "auto" and in_flight * self.rollouts_per_group > self.rollout.max_num_seqs:
            greedy = f" (+ {self.num_greedy} greedy)" if self.num_greedy else ""
            raise ValueError(
                f"rollout.max_groups_in_flight {in_flight} x group_size {self.rollout.group_size}{greedy} exceeds "
                f"rollout.max_num_seqs {self.rollout.max_num_seqs}; requests would wait inside vLLM"
            )
        return self

    @property
    def num_greedy(self) -> int:
        """Greedy rollouts of every prompt, besides the group's: advantages with a greedy baseline need one."""
        advantages = self.algorithm.advantages
        return int(isinstance(advantages, OutcomeAdvantages) and advantages.baseline == "greedy")

    @property
    def rollouts_per_group(self) -> int:
        """Trajectories of a group as it travels."""
        return self.rollout.group_size + self.num_greedy

    @property
    def resolved_algorithm(self) -> AlgorithmConfig:
        """`algorithm`, with the lengths that it leaves to the rollout."""
        algorithm, longest = self.algorithm, self.rollout.max_completion_tokens
        shaping, critic = algorithm.shaping, algorithm.critic
        if shaping.overlong is not None:
            shaping = shaping.model_copy(update={"overlong": shaping.overlong.resolved(longest)})
        if critic is not None:
            critic = critic.model_copy(update={"loss": _with_length(critic.loss, longest)})
        loss = _with_length(algorithm.loss, longest)
        return algorithm.model_copy(update={"loss": loss, "shaping": shaping, "critic": critic})

    def _check_group_size(self) -> None:
        if self.rollout.group_size < 2 and self.algorithm.compares_within_groups:
            raise ValueError(
                f"rollout.group_size 1 gives {self.algorithm.type} no group to compare with; use at least 2"
            )
        filters = self.algorithm.filter
        if self.rollout.group_size < 2 and filters.keep == "spread" and filters.group_of_one == "drop":
            raise ValueError(
                "algorithm.filter.keep spread leaves out every group of rollout.group_size 1; use at least 2, or set "
                "algorithm.filter.group_of_one: keep"
            )

    def _check_overlong(self) -> None:
        longest, overlong = self.rollout.max_completion_tokens, self.algorithm.shaping.overlong
        if overlong is None:
            return
        buffer = overlong.buffer_tokens or 0
        if overlong.max_tokens is None and buffer > longest:
            raise ValueError(
                f"algorithm.shaping.overlong.buffer_tokens {buffer} exceeds rollout.max_completion_tokens {longest}; "
                "lower it, or set algorithm.shaping.overlong.max_tokens"
            )
        resolved = overlong.resolved(longest)
        first = (resolved.max_tokens or 0) - (resolved.buffer_tokens or 0)
        if first >= longest:
            raise ValueError(
                f"algorithm.shaping.overlong.max_tokens {resolved.max_tokens} punishes answers of more than {first} "
                f"tokens, and rollout.max_completion_tokens is {longest}; lower it, or leave it out"
            )

    def _check_supervised(self) -> None:
        ptx, data = self.algorithm.loss.ptx, self.data
        names = ", ".join(source.path for source in data.supervised)
        if ptx.coef and not data.supervised:
            raise ValueError(
                f"algorithm.loss.ptx.coef {ptx.coef} has no supervised tokens; name a data set in data.supervised, or "
                "use 0.0"
            )
        if data.supervised and not ptx.coef:
            raise ValueError(
                f"data.supervised: {names} is never trained with algorithm.loss.ptx.coef 0; set it, or leave the data "
                "out (data.supervised=null)"
            )
        if data.max_supervised_tokens is not None and not data.supervised:
            raise ValueError(
                f"data.max_supervised_tokens {data.max_supervised_tokens} bounds nothing without data.supervised; "
                "leave it out"
            )

    def _check_kl_horizon(self) -> None:
        """A batch must not turn the sign of the coefficient, which a KL below its target lowers by at most a fifth a
        horizon."""
        kl_reward = self.algorithm.kl_reward
        num_trajectories = self.learner.prompts_per_batch * self.rollout.group_size
        if kl_reward is None or kl_reward.type == "fixed" or kl_reward.horizon > num_trajectories / 5:
            return
        raise ValueError(
            f"algorithm.kl_reward.horizon {kl_reward.horizon:g}: a batch of {num_trajectories} trajectories could make "
            f"the coefficient 0 or negative; set more than {num_trajectories / 5:g}"
        )

    def _check_critic_warmup(self) -> None:
        critic, num_versions = self.algorithm.critic, self.learner.max_versions
        if critic is not None and critic.warmup_versions >= num_versions:
            raise ValueError(
                f"algorithm.critic.warmup_versions {critic.warmup_versions} leaves none of learner.max_versions "
                f"{num_versions} to the policy; lower it"
            )

    def _check_evaluation(self) -> None:
        every = self.eval.every
        if every and not self.data.eval:
            raise ValueError(f"eval.every {every} evaluates nothing without data.eval; name a data set there")
        if self.eval.temperature == 0 and self.eval.num_samples > 1:
            raise ValueError(
                f"eval.num_samples {self.eval.num_samples} at eval.temperature 0 gives the same completion so often; "
                "use 1 sample, or a temperature above 0"
            )


def _with_length(loss: Loss, longest: int) -> Loss:
    """With a number in place of null."""
    if loss.aggregation.length is not None:
        return loss
    aggregation = loss.aggregation.model_copy(update={"length": float(longest)})
    return loss.model_copy(update={"aggregation": aggregation})
