"""The code of docs/algorithms.md, run as it stands there: a loss, advantages, a stage and a recipe of a user's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config import Config, load_config
from asyncrl.errors import LearnerError
from asyncrl.launch.algorithm_checks import named_functions
from asyncrl.launch.function_check import check_functions
from asyncrl.types import TrajectoryGroup
from tests.learner.learner_cases import (
    one_rank,
    plain_model,
    plain_tokens,
    shard_of_minibatches,
    uneven_groups,
    weights,
    write_model,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
STAGES = "algorithm.stages=[score, advantage, 'mine.py:f', correct, loss, update]"
LEARNER = ["learner={optimizer: sgd, lr: 0.5, max_grad_norm: 1.0e+6, epochs: 2}", "rollout.temperature=0.7"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page in the current folder."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in BLOCKS:
        sys.modules.pop(name.removesuffix(".py"), None)


def config_of(*overrides: str) -> Config:
    return load_config(None, [*LEARNER, *overrides])


def lead_advantages(groups: list[TrajectoryGroup], margin: float) -> torch.Tensor:
    """What the page's functions amount to, in the order of `plain_tokens`."""
    values: list[float] = []
    for group in groups:
        rewards = np.array([np.nan if t.reward is None else t.reward for t in group.trajectories])
        leads = np.nan_to_num(rewards - np.nanmean(rewards))
        for t, lead in zip(group.trajectories, leads, strict=True):
            sign = float(np.sign(lead)) * (abs(lead) > margin)
            values += [0.0 if place == 0 else sign for place in np.flatnonzero(t.loss_mask)]
    return torch.tensor(values)


def test_the_pages_recipe_trains_what_its_code_says(folder: Path):
    # Mutations: the built-in loss in place of the user's (only the second step tells them apart), its options or
    # those of the advantages dropped, the stage left out, the correction's weights left out.
    path = write_model(folder / "model", "llama", tied=True)
    groups = uneven_groups()
    config = config_of("algorithm=my_recipe:lead", "algorithm.advantages.options.margin=0.2")
    check_functions(named_functions(config))
    with one_rank(path, config, folder / "store") as learner:
        before = weights(learner)
        metrics = learner.update(shard_of_minibatches(groups, [[[[0, 1], [2, 3, 4]]]], num_epochs=2))
        after = weights(learner)
    model = plain_model(path)
    advantages = lead_advantages(groups, margin=0.2)
    assert set(advantages.tolist()) == {-1.0, 0.0, 1.0}
    with torch.no_grad():
        proximal = plain_tokens(model, groups, 0.7).logprobs
    losses = []
    for _ in range(2):
        tokens = plain_tokens(model, groups, 0.7)
        ratio = (tokens.logprobs - proximal).exp()
        corrected = (proximal - tokens.rollout_logprobs).exp().clamp(max=2.0)
        loss = (-advantages * 0.1 * ((ratio - 1) / 0.1).tanh() * corrected).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    assert abs(losses[1]) > 1e-3
    assert metrics["actor/pg_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).norm()
        assert moved > 1e-4, name
        assert (after[name] - parameter.detach()).norm() < 1e-4 * moved, name


def test_reading_a_configuration_imports_the_recipe_and_neither_its_functions_nor_torch(folder: Path):
    # Mutations caught: names that are resolved as the configuration is read: the coordinator and the rollout servers
    # would import what only the learner ranks call.
    program = (
        "import sys; from asyncrl.config import load_config; load_config(None, ['algorithm=my_recipe:lead']); "
        "print([name for name in ('my_recipe', 'my_algorithm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == ("['my_recipe']", "")


def test_the_pages_tables_name_the_same_functions_one_by_one(folder: Path):
    # Mutation: a key of the page that the configuration does not have.
    [block] = re.findall(r"One by one, in the configuration:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "my.yaml").write_text(block)
    config = load_config("my.yaml")
    assert [function.name for function in named_functions(config)] == [
        "my_algorithm:sign_of_lead",
        "my_algorithm:tanh_ratio",
    ]
    check_functions(named_functions(config))


@pytest.mark.parametrize(
    ("source", "override", "says"),
    [
        (
            "def f(tokens): return tokens.learner_logprobs.sum()",
            "algorithm.loss.policy=mine.py:f",
            r"loss\.policy\.function 'mine\.py:f' gave a tensor \[\]; give one value a token, \[40\]",
        ),
        (
            "def f(tokens): return -tokens.advantages * tokens.learner_logprobs.detach()",
            "algorithm.loss.policy=mine.py:f",
            r"gave a tensor \[40\] without a gradient",
        ),
        (
            "def f(experience): return experience.batch.rewards",
            "algorithm.advantages=mine.py:f",
            r"advantages\.function 'mine\.py:f' gave a tensor \[15\]; give one value a trained token, \[40\]",
        ),
        (
            "def f(experience): return None",
            "algorithm.advantages=mine.py:f",
            r"gave a NoneType; give one value a trained token",
        ),
        (
            "def f(tokens): return -tokens.learner_logprobs / (tokens.advantages > 0)",
            "algorithm.loss.policy=mine.py:f",
            r"policy\.function 'mine\.py:f' gave NaN or Inf for 23 of 40 tokens; give a finite value for each",
        ),
        (
            "def f(experience): return experience.columns.rollout_logprobs * float('nan')",
            "algorithm.advantages=mine.py:f",
            r"advantages\.function 'mine\.py:f' gave NaN or Inf for 40 of 40 tokens",
        ),
        (
            "\ndef f(tokens): return tokens.rewards",
            "algorithm.loss.policy=mine.py:f",
            r"policy\.function 'mine\.py:f' failed with AttributeError: .*'rewards' \(mine\.py, line 2\)",
        ),
        (
            "def f(experience, context): experience.columns.advantages = experience.batch.rewards",
            "algorithm.stages=[score, advantage, 'mine.py:f', correct, loss, update]",
            r"stages 'mine\.py:f' gave a tensor \[15\]; leave experience\.columns\.advantages with one value",
        ),
        (
            "def f(experience, context): raise KeyError('nothing')",
            "algorithm.stages=['mine.py:f', score, advantage, correct, loss, update]",
            r"stages 'mine\.py:f' failed with KeyError: 'nothing' \(mine\.py, line 1\)",
        ),
        (
            "def f(experience, context): return experience.columns.advantages * 0",
            STAGES,
            r"algorithm\.stages 'mine\.py:f' returned a Tensor, which goes nowhere; write into experience\.columns",
        ),
        (
            "def f(experience, context): experience.columns.entropy = experience.batch.rewards",
            STAGES,
            r"stages 'mine\.py:f' left \[15\] in columns\.entropy; one value a token is \[40\]",
        ),
        (
            "def f(experience, context): experience.columns.advantages = None",
            STAGES,
            r"stages 'mine\.py:f' gave a NoneType; leave experience\.columns\.advantages",
        ),
        (
            "def f(experience, context): experience.metrics['mine'] = experience.columns.advantages.mean()",
            STAGES,
            r"left a Tensor in metrics\['mine'\]; make it a number with float\(\)",
        ),
    ],
    ids=[
        "a number",
        "no gradient",
        "one a trajectory",
        "nothing",
        "an infinite loss",
        "a NaN advantage",
        "a loss that raises",
        "a stage's wrong column",
        "a stage that raises",
        "a stage that returns",
        "a stage's other column",
        "a stage that takes advantages away",
        "a metric that is a tensor",
    ],
)
def test_what_is_no_value_of_each_token_is_refused(folder: Path, source: str, override: str, says: str):
    # Mutations: take it as it is -> a broadcast loss, a step without a gradient, an AttributeError, a gradient of NaN
    # that is blamed on learner.lr; let what it raises through -> an error that names neither the key nor the function;
    # a stage without effect.
    (folder / "mine.py").write_text(source)
    path = write_model(folder / "model", "llama", tied=True)
    with (
        one_rank(path, config_of(override), folder / "store") as learner,
        pytest.raises(LearnerError, match=says),
    ):
        learner.update(shard_of_minibatches(uneven_groups(), [[[[0, 1, 2, 3, 4]]]]))


def test_a_loss_of_ones_own_is_not_asked_for_a_microbatch_without_tokens(folder: Path):
    # Mutation: call it -> "max(): Expected reduction dim" on the rank that has fewer groups than the others.
    (folder / "mine.py").write_text(
        "def f(tokens): return -tokens.advantages / tokens.advantages.abs().max() * tokens.learner_logprobs"
    )
    path = write_model(folder / "model", "llama", tied=True)
    with one_rank(path, config_of("algorithm.loss.policy=mine.py:f"), folder / "store") as learner:
        metrics = learner.update(shard_of_minibatches(uneven_groups(), [[[[0, 1], [], [2, 3, 4]]]]))
    assert metrics["actor/grad_norm"] > 0


def test_a_loss_that_writes_into_its_tokens_changes_no_later_step(folder: Path):
    # Mutation: hand over views of the batch's columns -> the second epoch sees the halved advantages of the first.
    path = write_model(folder / "model", "llama", tied=True)
    found = []
    for number, half in enumerate(("tokens.advantages * 0.5", "tokens.advantages.mul_(0.5)")):
        file = folder / f"half{number}.py"
        file.write_text(f"def f(tokens): return -{half} * tokens.learner_logprobs")
        with one_rank(
            path, config_of(f"algorithm.loss.policy={file}:f"), folder / f"store{number}"
        ) as learner:
            learner.update(shard_of_minibatches(uneven_groups(), [[[[0, 1], [2, 3, 4]]]], num_epochs=2))
            found.append(weights(learner))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
