"""The staleness rules: when a group is leased, when a batch forms and of what, and which tokens train.

Pure functions over integers. The ledger calls them; they hold no state and read no clock.

    v    the learner's version: batches trained so far         S    `max_staleness`
    k    batches formed so far = index of the next batch       B    groups a batch
    s_j  the version that server j last echoed as committed
    outstanding = groups that are leased or finished, and neither in a batch nor consumed

What the caller owes (the arguments below rest on it):
1. Versions are announced (v rises) before any server may commit them; a server's version never falls.
2. A grant happens only while `can_lease`, lowest ordinal first. A lost lease leaves the outstanding set at
   once and is the first to be granted again. The first accepted result of an ordinal wins.
3. After every change it consumes what `choose_batch` calls untrainable, forms the batch it names if
   `can_form_batch`, and then grants leases.

Safety.
- Never older than S (`mask`): batch k trains exactly the tokens for which `token_is_trained` holds, that is
  k - version <= S, and k is the batch's own index: decided when the batch forms, it cannot change.
- Never from the future: by 1 a token's version is at most v when it is sampled; v <= k because the learner
  trains only formed batches. So staleness k - version >= 0.
- v <= k <= v + 2: forming needs k <= v + 1.
- Bounded work: outstanding + lost + k B <= (S + v + 1) B. A fresh ordinal is granted only when nothing is
  lost, under the same bound with s_j <= v; losing and granting again move a group within the sum, even when
  the lost server's result still comes; forming trades B groups for k + 1; consuming shrinks it; v only
  grows. Hence outstanding <= (S + 1 + v - k) B, at most (S + 1) B, and k <= v + S + 1.
- S = 0 is the synchronous algorithm: `can_lease` needs s_j >= k, so s_j = v = k. At most B groups are then
  outstanding or lost, so batch k needs every one of them that does not fail, and v cannot move before it
  forms: all its tokens are of version k. Refills are the next ordinals, granted at version k too.

Liveness. Assume: a batch trains in finite time; a lease ends in finite time, with a result or lost, and is
not lost for ever again; some server in time commits the newest version; not every further group fails.
Suppose batch k never forms.
- The learner trains all that was formed, so v = k from some time on, `can_form_batch` holds, and no newer
  version appears. Some server then echoes s_j = k.
- Every outstanding group finishes. Untrainable ones are consumed, so fewer than B stay, and these stay
  trainable, because only k ages them.
- Then outstanding < B <= (S + s_j + 1 - k) B: `can_lease` holds and lost or fresh ordinals are granted.
- `can_lease` implies s_j >= k - S: a fresh group granted at this k has only tokens of version k - S or
  newer, all trainable at k, and adds one to the finished groups unless it fails. Groups granted earlier,
  outstanding or lost, are at most (S + 1) B, so only so many can turn out untrainable by age.
- So B trainable groups are finished after finitely many grants, and batch k forms: a contradiction.
With `keep` every token is trainable at any age, which only makes this easier; its ages have no hard bound.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

OverAge = Literal["mask", "keep"]


@dataclass(frozen=True, slots=True)
class Pacing:
    """The two numbers that pace a run."""

    batch_size: int
    """B: groups a batch, at least 1."""
    max_staleness: int
    """S, at least 0."""
    max_versions: int
    """Batches of the whole run: nothing is leased beyond them."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """What the rules need to know of a finished group."""

    ordinal: int
    first_version: int
    """Oldest version among all its tokens."""
    newest_trainable_version: int | None
    """Newest version among the tokens that may train; None without any, as when every rollout failed."""


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """What the finished groups amount to at one batch index."""

    ordinals: tuple[int, ...] | None
    """The B groups of the batch, sorted; None while fewer than B trainable groups are finished."""
    consumed_untrainable: tuple[int, ...]
    """Finished groups without a trainable token, sorted. They will never have one: consume and count them
    now, whether or not the batch forms, or they hold back the leases that replace them."""


def num_leases_allowed(
    pacing: Pacing, *, outstanding: int, num_batches_formed: int, server_version: int
) -> int:
    """How many more groups pacing lets a server at `server_version` take now; never negative."""
    limit = min(pacing.max_staleness + server_version + 1, pacing.max_versions) * pacing.batch_size
    return max(0, limit - num_batches_formed * pacing.batch_size - outstanding)


def can_lease(pacing: Pacing, *, outstanding: int, num_batches_formed: int, server_version: int) -> bool:
    """Whether one more group may be leased: outstanding + k B < min(S + s_j + 1, max_versions) B."""
    allowed = num_leases_allowed(
        pacing,
        outstanding=outstanding,
        num_batches_formed=num_batches_formed,
        server_version=server_version,
    )
    return allowed > 0


def can_form_batch(*, num_batches_formed: int, learner_version: int) -> bool:
    """Whether the next batch may form: the learner trains batch v and holds at most one batch ahead."""
    return num_batches_formed <= learner_version + 1


def oldest_trained_version(*, batch_index: int, max_staleness: int, over_age: OverAge) -> int:
    """The oldest version whose tokens train in batch `batch_index`: 0 under `keep`."""
    return 0 if over_age == "keep" else max(0, batch_index - max_staleness)


def token_is_trained(*, batch_index: int, token_version: int, max_staleness: int, over_age: OverAge) -> bool:
    """Whether age lets a token train in batch `batch_index` (its loss mask must be 1 besides).

    Under `mask` this is staleness <= S. For whole arrays compare with `oldest_trained_version`.
    """
    return token_version >= oldest_trained_version(
        batch_index=batch_index, max_staleness=max_staleness, over_age=over_age
    )


def choose_batch(
    finished: Collection[FinishedGroup], *, batch_index: int, pacing: Pacing, over_age: OverAge
) -> BatchChoice:
    """Splits the finished groups into the batch, the untrainable, and the rest, which waits.

    The batch is the B trainable groups with the oldest first version, ties by lowest ordinal. The result does
    not depend on the order of `finished`.
    """

    def is_trainable(group: FinishedGroup) -> bool:
        return group.newest_trainable_version is not None and token_is_trained(
            batch_index=batch_index,
            token_version=group.newest_trainable_version,
            max_staleness=pacing.max_staleness,
            over_age=over_age,
        )

    trainable = sorted(filter(is_trainable, finished), key=lambda group: (group.first_version, group.ordinal))
    untrainable = sorted(group.ordinal for group in finished if not is_trainable(group))
    ordinals = None
    if len(trainable) >= pacing.batch_size:
        ordinals = tuple(sorted(group.ordinal for group in trainable[: pacing.batch_size]))
    return BatchChoice(ordinals=ordinals, consumed_untrainable=tuple(untrainable))
