"""Supervised tokens beside the trajectories: `loss.ptx.coef` against a plain loop, and which rows a step takes.

Two ranks are compared with one in test_flow.py (its scenarios `ptx`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.envs.dataset import load_tokenizer
from asyncrl.envs.supervised import SupervisedDataset, load_supervised
from asyncrl.errors import LearnerError
from asyncrl.learner.ptx import SupervisedSteps, agree_on_rows, spread_rows
from asyncrl.learner.update import PolicyLearner
from asyncrl.models.tiny import build_tokenizer
from asyncrl.types import Plan
from tests.learner.learner_cases import (
    assert_gradients_close,
    one_rank,
    plain_model,
    plain_rows,
    record_gradients,
    sgd_config,
    shard_of_minibatches,
    uneven_groups,
    write_model,
)

COEF = 0.3
ROWS = [
    {"prompt": "2+3=", "completion": "5"},
    {"prompt": "abcdefgh", "completion": "hgfedcba"},
    {"text": "the sum of it"},
    {"prompt": "x", "completion": "yzyzyzyzyzyzyzyzyzyz"},
    {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]},
]


def write_supervised_model(folder: Path) -> Path:
    """A model whose tokenizer knows the rows' characters."""
    path = write_model(folder / "model", "llama", tied=True)
    build_tokenizer().save_pretrained(path)
    (folder / "supervised.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def ptx_config(
    model_path: Path, *, rows: int = 5, tokens: int = 8192, lr: float = 0.5, **algorithm: object
) -> Config:
    """Rollouts at temperature 0.7, which the supervised tokens have nothing of."""
    tree = sgd_config(lr=lr, max_tokens_per_microbatch=tokens).model_dump(mode="json")
    loss = {"ptx": {"coef": COEF, "rows_per_minibatch": rows}}
    tree["algorithm"] = {"loss": loss} | algorithm
    tree["data"]["supervised"] = [{"path": str(model_path.with_name("supervised.jsonl"))}]
    return Config.model_validate_json(json.dumps(tree))


def dataset_of(model_path: Path, config: Config) -> SupervisedDataset:
    return load_supervised(config, load_tokenizer(model_path))


def steps_of(learner: PolicyLearner) -> SupervisedSteps:
    steps = learner._policy_steps._supervised
    assert steps is not None
    return steps


def plain_ptx(
    model_path: Path, dataset: SupervisedDataset, rows: list[int]
) -> tuple[float, dict[str, torch.Tensor]]:
    """COEF x the mean of -log pi over the rows' completions and its gradient: a row at a time, in float64."""
    model = plain_model(model_path).double()
    logprobs = []
    for row in (dataset[i] for i in rows):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        of_row = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logprobs += [of_row[t - 1, ids[t]] for t in range(len(row.prompt_ids), len(ids))]
    loss = -COEF * torch.stack(logprobs).mean()
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


# Mutations caught: the rollouts' temperature; trained prompt tokens; a mean of the means of rows or microbatches; the
# count of the trajectories' tokens; the coefficient once in the value and not in the gradient.
@pytest.mark.parametrize("tokens", [8192, 20, 1])
def test_value_and_gradient_are_those_of_a_plain_loop_whatever_the_token_budget(tmp_path: Path, tokens: int):
    path, groups = write_supervised_model(tmp_path), uneven_groups()
    config = ptx_config(path, tokens=tokens)
    with one_rank(path, config, tmp_path / "store") as learner:
        gradients = record_gradients(learner)
        shard = shard_of_minibatches(groups, [[[[0, 1], [2, 3, 4]]]], index=3)
        rows = steps_of(learner).rows_of(shard.plan, 0)
        metrics = learner.update(shard)
    dataset = dataset_of(path, config)
    value, expected = plain_ptx(path, dataset, rows)
    _, of_policy = plain_rows(path, groups, 0.7)
    assert metrics["actor/ptx_loss"] == pytest.approx(value, rel=1e-6)
    assert metrics["batch/supervised_tokens"] == dataset.completion_lengths.sum() == 2 + 9 + 13 + 21 + 3
    # The policy's own part is taken off: it would hide a mistake in a term of its size.
    found = {name: gradient - of_policy[name] for name, gradient in gradients.items()}
    assert_gradients_close(found, expected, rtol=2e-5)


def test_a_denominator_that_is_known_afterwards_is_not_that_of_supervised_tokens(tmp_path: Path):
    # Mutation: leave the scale of the step out -> the term is divided by the kept tokens too.
    path, groups = write_supervised_model(tmp_path), uneven_groups()
    rejection = {"statistic": "ratio", "lower": 1e-9, "upper": 1e9, "between": "learner_rollout"}
    config = ptx_config(path, correction={"rejections": [rejection], "denominator": "kept"})
    with one_rank(path, config, tmp_path / "store") as learner:
        gradients = record_gradients(learner)
        shard = shard_of_minibatches(groups, [[[[0, 1], [2, 3, 4]]]])
        rows = steps_of(learner).rows_of(shard.plan, 0)
        metrics = learner.update(shard)
    value, expected = plain_ptx(path, dataset_of(path, config), rows)
    assert metrics["actor/ptx_loss"] == pytest.approx(value, rel=1e-5)
    _, of_policy = plain_rows(path, groups, 0.7)
    assert_gradients_close({name: g - of_policy[name] for name, g in gradients.items()}, expected, rtol=2e-5)


def test_every_step_takes_rows_of_its_own_and_the_metrics_are_of_all_steps(tmp_path: Path):
    # Mutations: the rows of the version's first step in all of them; tokens, or the loss, of the last step alone.
    path, groups = write_supervised_model(tmp_path), uneven_groups()
    config = ptx_config(path, rows=2, lr=0.0)
    with one_rank(path, config, tmp_path / "store") as learner:
        shard = shard_of_minibatches(groups, [[[[0, 2, 4]]], [[[1, 3]]]], num_epochs=2, index=1)
        steps = steps_of(learner)
        rows = [steps.rows_of(shard.plan, step) for step in range(4)]
        metrics = learner.update(shard)
    in_order = [row for of_step in rows for row in of_step]  # positions 8 to 15; an epoch is 10 to 14
    assert sorted(in_order[2:7]) == [0, 1, 2, 3, 4]
    dataset = dataset_of(path, config)
    assert metrics["batch/supervised_tokens"] == dataset.completion_lengths[in_order].sum()
    of_steps = [plain_ptx(path, dataset, of_step)[0] for of_step in rows]
    weights = [shard.plan.num_trained_tokens_of(number) for number in (0, 1, 0, 1)]
    expected = sum(w * loss for w, loss in zip(weights, of_steps, strict=True)) / sum(weights)
    assert metrics["actor/ptx_loss"] == pytest.approx(expected, rel=1e-6)


def plan_of(index: int, num_minibatches: int, num_epochs: int) -> Plan:
    return Plan(index, [], [], [], [[[[]]]] * num_minibatches, num_epochs)


def test_the_order_is_a_pure_function_of_the_step_and_has_every_row_once_an_epoch(tmp_path: Path):
    # Mutations: an order of the rank; a step count that begins again with every version or epoch; rows drawn anew.
    path = write_supervised_model(tmp_path)
    config = ptx_config(path, rows=2)
    dataset = dataset_of(path, config)
    ranks = [SupervisedSteps(config, dataset, torch.device("cpu"), rank=rank, num_ranks=2) for rank in (0, 1)]
    taken = [
        [steps.rows_of(plan_of(index, 2, 2), step) for index in range(5) for step in range(4)]
        for steps in ranks
    ]
    assert taken[0] == taken[1]
    rows = [row for of_step in taken[0] for row in of_step]
    epochs = [rows[first : first + 5] for first in range(0, 40, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert ranks[0].rows_of(plan_of(3, 2, 2), 1) == taken[0][3 * 4 + 1]
    assert ranks[0].num_tokens(plan_of(3, 2, 2), 2) == sum(
        int(dataset.completion_lengths[row]) for of_step in taken[0][12:14] for row in of_step
    )


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=20),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 60),
)
def test_every_row_is_in_one_microbatch_and_every_rank_has_as_many(lengths, num_ranks, max_tokens):
    # Mutations: ranks with one microbatch more (FSDP's collectives would hang); a row that shares a microbatch beyond
    # the budget, or is in none.
    spread = spread_rows(lengths, num_ranks, max_tokens)
    assert len(spread) == num_ranks
    assert len({len(of_rank) for of_rank in spread}) == 1
    microbatches = [microbatch for of_rank in spread for microbatch in of_rank]
    assert sorted(row for microbatch in microbatches for row in microbatch) == list(range(len(lengths)))
    assert all(len(m) <= 1 or sum(lengths[row] for row in m) <= max_tokens for m in microbatches)


def test_rows_are_spread_evenly_in_few_microbatches():
    # Mutation: a microbatch a row; all of them on rank 0.
    assert spread_rows([4, 3, 2, 1], 2, 100) == [[[0, 3]], [[1, 2]]]
    assert spread_rows([4, 3, 2, 1], 1, 5) == [[[0, 3], [1, 2]]]
    assert spread_rows([9], 2, 5) == [[[0]], [[]]]


def test_ranks_that_read_different_rows_refuse_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: compare the number of rows.
    path = write_supervised_model(tmp_path)
    dataset = dataset_of(path, ptx_config(path))
    (tmp_path / "supervised.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[::-1]))
    other = dataset_of(path, ptx_config(path))
    assert len(other) == len(dataset)

    def reduced_with(theirs: SupervisedDataset):
        def all_reduce(tensor: torch.Tensor, op: object, group: object) -> None:
            assert op == dist.ReduceOp.MIN
            tensor.copy_(torch.minimum(tensor, torch.tensor([theirs.digest, -theirs.digest])))

        return all_reduce

    group, cpu = None, torch.device("cpu")
    monkeypatch.setattr(dist, "all_reduce", reduced_with(dataset))
    agree_on_rows(dataset, group, cpu)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(dist, "all_reduce", reduced_with(other))
    with pytest.raises(LearnerError, match="the ranks read different rows"):
        agree_on_rows(dataset, group, cpu)  # pyright: ignore[reportArgumentType]
