"""Cross entropy of good answers beside the policy loss: `loss.ptx.positive_coef`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import load_config
from tests.learner.learner_cases import one_rank, plain_rows, shard_of_minibatches, uneven_groups, write_model


def test_good_answers_add_the_token_mean_of_their_cross_entropy(tmp_path: Path):
    # Mutations: all trajectories for those with a reward above 0; the count of all tokens, or of one microbatch.
    path, groups = write_model(tmp_path / "model", "llama", tied=True), uneven_groups()
    config = load_config(None, ["algorithm.loss.ptx.positive_coef=0.5", "rollout.temperature=0.7"])
    with one_rank(path, config, tmp_path / "store") as learner:
        metrics = learner.update(shard_of_minibatches(groups, [[[[0, 1], [2, 3, 4]]]]))
    logprobs, _ = plain_rows(path, groups, 0.7)
    is_good = np.concatenate(
        [np.full(t.loss_mask.sum(), (t.reward or 0.0) > 0) for group in groups for t in group.trajectories]
    )
    assert 0 < is_good.sum() < len(is_good)
    expected = -0.5 * float(logprobs.numpy()[is_good].mean())
    assert metrics["actor/positive_loss"] == pytest.approx(expected, rel=1e-5)
