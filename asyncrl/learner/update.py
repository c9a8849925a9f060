"""One policy version: the stages of the recipe over a batch, then its optimizer steps.

Every rank of the learner loop holds one PolicyLearner and calls its methods in the same order, from the main
thread: most of them issue collectives.

    receive_shard    the shard as columns (experience.py)
    stages           log-probs, values, advantages: what the recipe names, once a batch (stages.py)
    steps            a mini-batch: forward, loss (loss.py), backward, step; again in every epoch (steps.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.algorithms.losses.kl_controller import AdaptiveKlController, build_kl_controller
from asyncrl.config import Config, learner_kind
from asyncrl.dtypes import publish_dtype
from asyncrl.envs.dataset import load_tokenizer
from asyncrl.envs.supervised import load_supervised
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint import LearnerState, Part, read_shards, read_state, write_shard
from asyncrl.learner.experience import receive_shard
from asyncrl.learner.export import export_model
from asyncrl.learner.finite import first_non_finite, shard_norms
from asyncrl.learner.flow import find_stages
from asyncrl.learner.lora import save_adapter
from asyncrl.learner.loss import add_by_staleness
from asyncrl.learner.mesh import copy_group, data_rank, is_first_replica, num_data_ranks
from asyncrl.learner.mfu import ModelFlops
from asyncrl.learner.model import TensorShard
from asyncrl.learner.ptx import SupervisedSteps, agree_on_rows
from asyncrl.learner.rank_models import RankModels
from asyncrl.learner.stages import StageContext
from asyncrl.learner.steps import CriticSteps, PolicySteps, value_metrics
from asyncrl.learner.totals import Totals
from asyncrl.types import Plan, Shard


class PolicyLearner:
    """The trained policy on one rank, with what its recipe needs besides: reference, critic, optimizers."""

    def __init__(self, model_path: Path, config: Config, *, mesh: DeviceMesh) -> None:
        """`model_path`: a folder in Hugging Face format. `mesh`: over all ranks, on cpu (gloo) or cuda (nccl):
        `make_mesh("cpu", num_ranks)` after init_process_group."""
        algorithm = config.resolved_algorithm
        config = config.model_copy(update={"algorithm": algorithm})
        self._config = config
        self._model_path = model_path
        self._mesh = mesh
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._device = torch.device(mesh.device_type)
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype(config, mesh.device_type))
        self._models = RankModels(model_path, config, mesh=mesh)
        self._stages = find_stages(algorithm.stages)
        controller = build_kl_controller(algorithm.kl_reward) if algorithm.kl_reward is not None else None
        self._context = StageContext(
            algorithm, self._models, controller, [reward.weight for reward in config.reward]
        )
        self._policy_steps = PolicySteps(config, self._models, self._supervised_steps())
        self._critic_steps = CriticSteps(config, self._models) if self._models.critic is not None else None

    @property
    def model_flops(self) -> ModelFlops:
        """Of the policy."""
        return ModelFlops.of(self._models.policy.transformer.config)

    def update(self, shard: Shard) -> dict[str, float]:
        """Trains batch `shard.plan.index`: in every epoch one optimizer step a mini-batch, over all ranks.

        What the stages fill, proximal log-probs and advantages among it, is of the batch's start, in every step.
        Returns metrics that are already reduced over ranks: means over the tokens of all steps, gradient norms over
        the steps. Raises LearnerError, without a step, on every rank when the ranks hold different plans, and on this
        rank alone when the shard is not this rank's share of its plan; on every rank, after the steps before it,
        when the gradient of a step is not finite.
        """
        plan = shard.plan
        self._check_shard(shard)
        self.agree_on(plan)
        experience, totals = receive_shard(shard, self._device), Totals()
        for stage in self._stages:
            stage(experience, self._context)
        self._models.reshard()
        metrics: dict[str, float] = {}
        if experience.correction is not None:
            staleness = experience.index - experience.columns.policy_versions
            add_by_staleness(experience.correction, staleness, self._config.max_staleness)
            totals.add_diagnostics(experience.correction.diagnostics)
        critic = self._config.algorithm.critic
        if critic is None or plan.index >= critic.warmup_versions:
            with experience.timed("update_actor"):
                metrics |= self._policy_steps.take(experience, plan, totals)
        if self._critic_steps is not None:
            with experience.timed("update_critic"):
                metrics |= self._critic_steps.take(experience, plan, totals)
        metrics |= value_metrics(experience, self._models)
        if self._models.reference is not None:
            self._models.reference.after_version(plan.index + 1, self._models.policy)
        return experience.metrics | metrics | totals.reduce(self._models.data_group, self._device)

    def agree_on(self, plan: Plan) -> None:
        """Raises LearnerError on every rank when the ranks hold different plans. `update` calls it first: ranks
        that entered FSDP's collectives with different batches would hang or mix them. Collective."""
        mine = torch.tensor([plan.index, plan.digest], device=self._device)
        bounds = torch.cat([mine, -mine])
        dist.all_reduce(bounds, dist.ReduceOp.MIN, group=self._group)
        lowest, highest = bounds[:2].tolist(), (-bounds[2:]).tolist()
        if lowest != highest:
            raise LearnerError(
                f"the ranks hold different plans: batch {lowest[0]} and {highest[0]}, digest {lowest[1]:016x} "
                f"and {highest[1]:016x}; this rank has batch {plan.index}, digest {plan.digest:016x}; "
                "this is a fault of the coordinator: restart the run"
            )

    def check_finite(self) -> None:
        """Raises LearnerError on every rank when a weight is NaN or Inf, naming the first such tensor; those of the
        critic follow the policy's. Collective, one all-reduce for both."""
        norms = {shard.name: shard_norms([shard.rows]) for shard in self.named_shards()}
        norms |= {name: shard_norms([rows]) for name, rows in self._models.critic_shards()}
        if (index := first_non_finite(torch.cat(list(norms.values())), self._group)) is not None:
            name = list(norms)[index]
            knob = "algorithm.critic.lr" if name.startswith("critic.") else "learner.lr"
            raise LearnerError(
                f"weights of {name} are not finite; this version is not published; "
                f"lower {knob} or raise learner.warmup_versions"
            )

    @property
    def publishes(self) -> bool:
        """Whether this rank's rows are those that are published: of several copies the first."""
        return is_first_replica(self._mesh)

    def named_shards(self) -> Iterator[TensorShard]:
        """This rank's rows of every tensor, in the order of Hugging Face's state dict, a tied one once. Collective."""
        return self._models.policy.named_shards()

    def export(self, folder: Path) -> None:
        """Rank 0 writes the model to `folder`, which must not exist, in Hugging Face format. Collective.

        Of adapters the merged model, and `adapter` beside it for peft.
        """
        is_writer = dist.get_rank() == 0
        export_model(
            self.named_shards(),
            self._model_path,
            folder,
            dtype=self._publish_dtype,
            group=copy_group(self._mesh),
            is_writer=is_writer,
        )
        if (lora := self._config.learner.lora) is not None:
            save_adapter(
                self._models.policy.transformer,
                lora,
                self._config.model,
                folder.with_name("adapter"),
                is_writer=is_writer,
            )

    def _supervised_steps(self) -> SupervisedSteps | None:
        """Where the loss has supervised tokens. Collective then."""
        if not self._config.algorithm.loss.ptx.coef:
            return None
        dataset = load_supervised(self._config, load_tokenizer(self._model_path))
        agree_on_rows(dataset, self._group, self._device)
        return SupervisedSteps(
            self._config,
            dataset,
            self._device,
            rank=data_rank(self._mesh),
            num_ranks=num_data_ranks(self._mesh),
        )

    def save(self, folder: Path, version: int) -> None:
        """Writes this rank's files of the checkpoint of `version`, between one batch and the next; no collective.

        Raises LearnerError where they cannot be written.
        """
        parts, controller = self._parts(), self._context.kl_controller
        state = LearnerState(
            version,
            learner_kind(self._config),
            {name: part.optimizer.num_steps for name, part in parts.items() if part.optimizer is not None},
            controller.coefficient if isinstance(controller, AdaptiveKlController) else None,
        )
        write_shard(folder, state, parts, self._mesh)

    def load(self, folder: Path) -> int:
        """Takes up where the learner that wrote `folder` was, on however many ranks; returns its version.

        Raises LearnerError, naming both, for a checkpoint of another model or recipe, and for a damaged one.
        """
        state = read_state(folder, learner_kind(self._config))
        read_shards(folder, state, self._parts())
        if isinstance(self._context.kl_controller, AdaptiveKlController) and state.kl_coefficient is not None:
            self._context.kl_controller.coefficient = state.kl_coefficient
        return state.version

    def _parts(self) -> dict[str, Part]:
        """Whatever a batch changes."""
        optimizer, models = self._policy_steps.optimizer, self._models
        parts = {"policy": Part(optimizer.parameters, optimizer)}
        if models.critic is not None:
            parts["critic"] = Part(models.critic.optimizer.parameters, models.critic.optimizer)
        if self._refreshes and models.reference is not None:
            parts["reference"] = Part(dict(models.reference.model.transformer.named_parameters()), None)
        return parts

    @property
    def _refreshes(self) -> bool:
        return self._config.algorithm.reference.refresh_every > 0

    def _check_shard(self, shard: Shard) -> None:
        plan, rank = shard.plan, data_rank(self._mesh)
        expected = [plan.ordinals[position] for position in plan.positions_of(rank)]
        ordinals = [group.ordinal for group in shard.groups]
        if shard.rank != rank or ordinals != expected:
            raise LearnerError(
                f"data rank {rank} got a shard of {shard.rank} with groups {ordinals}, but the plan of batch "
                f"{plan.index} gives it {expected}; this is a fault of the coordinator: restart the run"
            )
        for number in range(len(plan.minibatches)):
            if plan.num_trained_tokens_of(number) == 0:
                raise LearnerError(
                    f"mini-batch {number} of batch {plan.index} has no trained token; a step needs at least one"
                )
