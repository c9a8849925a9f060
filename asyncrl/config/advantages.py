"""`algorithm.advantages`: how rewards become the advantage of each trained token.

One table a family, chosen by `type`; the names of published algorithms are types too (`grpo`, `rloo`, `opo`, ...) and
stand for a table with some options set, and `preset` names a peer whose whole convention is taken over: see
advantage_presets.py. What is written beside them wins.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, field_validator

from asyncrl.config.advantage_presets import ALGORITHMS, Peer, with_presets
from asyncrl.config.table import Table, names_a_function
from asyncrl.user_code import did_you_mean, names_user_code

NonNegative = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Over = Literal["group", "batch"]
Deviation = Literal["sample", "population", "leave_one_out"]


class Whitening(Table):
    """Advantages to mean 0 and deviation 1 over all trained tokens of the batch."""

    shift_mean: bool = True
    """Subtract the mean. False only scales what is around it."""
    deviation: Literal["sample", "population", "none"] = "sample"
    """Squares over n - 1, or n. `none`: only the mean is subtracted."""
    epsilon: NonNegative = 1e-8
    """Keeps the divisor from 0."""
    epsilon_in: Literal["variance", "std", "variance_floor"] = "variance"
    """sqrt(variance + epsilon); sqrt(variance) + epsilon; sqrt(max(variance, epsilon))."""


class Whitened(Table):
    """What is done to advantages of trajectories once they are there."""

    whiten: Whitening | None = None
    """Afterwards, to mean 0 and deviation 1."""
    whiten_over: Literal["tokens", "trajectories"] = "tokens"
    """A long answer weighs more in the moments, or all the same."""

    @property
    def token_whitening(self) -> Whitening | None:
        """What is left to do with the moments of all ranks' tokens."""
        return self.whiten if self.whiten_over == "tokens" else None

    @property
    def trajectory_whitening(self) -> Whitening | None:
        """What the rewards of the whole batch are enough for."""
        return self.whiten if self.whiten_over == "trajectories" else None


class OutcomeAdvantages(Whitened):
    """(reward - baseline) / (scale + epsilon), one a trajectory. Named: grpo (the defaults), dr_grpo, rloo, opo, gpg,
    maxrl, remax, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline."""

    type: Literal["outcome"] = "outcome"
    preset: Peer | None = None
    """A peer's convention."""
    baseline: Literal["mean", "leave_one_out", "length_weighted", "greedy", "none"] = "mean"
    """What a reward is compared with. `greedy`: the reward of a greedy rollout of the prompt, one more rollout."""
    baseline_over: Over = "group"
    """Trajectories of the same prompt, or of the whole batch."""
    scale: Literal["std", "mean", "nonzero_share", "none"] = "std"
    """What the difference is divided by."""
    scale_over: Over = "group"
    """See baseline_over."""
    deviation: Deviation = "sample"
    """`scale: std`: squares over n - 1, over n, or the sample deviation of the other trajectories."""
    deviation_around: Literal["mean", "baseline"] = "mean"
    """`scale: std`: distances from the mean, or from each trajectory's own baseline (AReaL)."""
    epsilon: NonNegative = 1e-6
    """Keeps the scale from 0."""
    epsilon_form: Literal["added", "floor", "where_positive"] = "added"
    """scale + epsilon; max(scale, epsilon); or added where the scale is positive, and 1 where it is 0."""
    group_of_one: Literal["zero", "reward"] = "zero"
    """A trajectory without others to compare with gets 0, or its reward."""
    gamma: UnitInterval = 1.0
    """Discount a token towards the end of the answer."""
    gaps: Literal["carry", "discount", "cut"] = "carry"
    """Tokens that do not train, between two that do: cost nothing, cost gamma each, or stop the credit."""
    kl_credit: Literal["to_go", "own_token", "trajectory"] = "to_go"
    """With KL in the reward: a token answers for its own penalty and the later ones, or for its own, after baseline and
    scale; or the sum over the trajectory is subtracted from its reward, before them."""


class PassAtKAdvantages(Table):
    """Only the best trajectory of a group is reinforced, by its lead over the second."""

    type: Literal["pass_at_k"] = "pass_at_k"
    preset: Peer | None = None
    """A peer's convention."""
    divide_by_std: bool = True
    """Divide the lead by the group's deviation."""
    epsilon: NonNegative = 1e-6
    """Added to the deviation."""


class ComponentAdvantages(Whitened):
    """Each of several rewards centred and scaled alone, then added up (GDPO, arXiv:2601.05242)."""

    type: Literal["gdpo"] = "gdpo"
    preset: Peer | None = None
    """A peer's convention."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """See `outcome`."""
    scale: Literal["std", "none"] = "std"
    """See `outcome`."""
    deviation: Deviation = "sample"
    """See `outcome`."""
    epsilon: NonNegative = 1e-6
    """See `outcome`."""
    epsilon_form: Literal["added", "floor", "where_positive"] = "added"
    """See `outcome`."""
    group_of_one: Literal["zero", "reward"] = "zero"
    """See `outcome`."""
    whiten: Whitening | None = Whitening()
    """The sum, afterwards."""


class GaeAdvantages(Table):
    """Generalised advantage estimation with a critic (PPO)."""

    type: Literal["gae"] = "gae"
    preset: Peer | None = None
    """A peer's convention."""
    gamma: UnitInterval = 1.0
    """Discount a token."""
    lam: UnitInterval = 1.0
    """Lambda of the advantages: 1 trusts returns, 0 the critic."""
    lam_value: UnitInterval | None = None
    """Lambda of the critic's targets (decoupled, VAPO); null: `lam`."""
    length_adaptive_alpha: NonNegative = 0.0
    """Above 0, `lam` of a trajectory of l tokens is 1 - 1 / (alpha l) (VAPO, arXiv:2504.05118)."""
    gaps: Literal["carry", "discount", "cut"] = "carry"
    """See `outcome`. `discount`: observations are states of value 0."""
    whiten: Whitening | None = Whitening()
    """Afterwards, over tokens."""


class TokenBaselineAdvantages(Table):
    """Reward to go minus a baseline of the group at the same token (optimal token baseline)."""

    type: Literal["otb"] = "otb"
    preset: Peer | None = None
    """A peer's convention."""
    steps: Literal["trained", "all"] = "all"
    """Tokens are aligned by their place, or by their number among those that train, which leaves observations out: and
    tokens that age masks (`over_age`), so that those behind them meet others."""
    zero_tail: bool = False
    """No baseline where only the longest trajectory of a group is left."""
    epsilon: NonNegative = 1e-8
    """Added to the sum of weights."""


class CustomAdvantages(Table):
    """Advantages of your own."""

    type: Literal["custom"] = "custom"
    function: str
    """`module:attr` or `path/to/file.py:attr` of f(experience: Experience, **options) -> Tensor [N]. The learner's
    log-probs are there, and a reference's where a KL term reads them."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    whiten: Whitening | None = None
    """Afterwards, over tokens."""

    @field_validator("function")
    @classmethod
    def _named(cls, value: str) -> str:
        return names_a_function(value)


AnyAdvantages = (
    OutcomeAdvantages
    | PassAtKAdvantages
    | ComponentAdvantages
    | GaeAdvantages
    | TokenBaselineAdvantages
    | CustomAdvantages
)

TABLES = ("outcome", "pass_at_k", "gdpo", "gae", "otb", "custom")
"""Their types."""


def advantage_options(value: Any) -> Any:
    """The options of a table that is named for short: by a name, or by `module:attr`."""
    if not isinstance(value, str):
        return value
    return {"type": "custom", "function": value} if names_user_code(value) else {"type": value}


def _expanded(value: Any) -> Any:
    value = advantage_options(value)
    names = [*ALGORITHMS, *TABLES]
    if isinstance(value, dict) and isinstance(name := value.get("type"), str) and name not in names:
        raise ValueError(f"{name!r} is no estimator{did_you_mean(name, names)}; there are {', '.join(names)}")
    return with_presets({"type": "outcome", **value}) if isinstance(value, dict) else value


AdvantagesConfig = Annotated[AnyAdvantages, Discriminator("type"), BeforeValidator(_expanded)]
"""What a field of the tree is annotated with: a table, or a name alone."""
