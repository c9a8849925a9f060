"""The exceptions that asyncrl raises on purpose.

    AsyncRLError
    |-- ConfigError        a key, its value, and what would be right   (also a ValueError; exit code 2)
    |-- DataError          a file, row or column that cannot be used   (also a ValueError; exit code 2)
    |-- WireError          a message that breaks the wire's schema     (also a ValueError)
    |-- PeerLost           a process at the other end is gone, or silent past its deadline
    |-- WeightSyncError    a version that cannot be published, verified or applied
    |   |-- SnapshotGone   its file is no longer there: a newer version is finished, wait for that
    |   `-- EngineUnfit    the engine's weights are half overwritten: restart it
    |-- EngineError        the engine refused, died, or answered nonsense
    |-- RewardError        no rollout gets a reward
    `-- LearnerError       a step that cannot be taken (non-finite gradient, ranks that disagree)

Every message says what is wrong, the value, and what to do.
"""


class AsyncRLError(Exception):
    """Base of everything below."""


class ConfigError(AsyncRLError, ValueError):
    """The configuration cannot run. Raised before any process starts; the CLI exits with 2."""


class DataError(AsyncRLError, ValueError):
    """A data set cannot be used as it is. Raised before any engine starts, but for a file that changes later; the
    CLI exits with 2."""


class WireError(AsyncRLError, ValueError):
    """A received message breaks the schema. The receiver refuses and counts it; it never dies of it."""


class PeerLost(AsyncRLError):
    """The process at the other end is gone or past its deadline."""


class WeightSyncError(AsyncRLError):
    """A policy version cannot be published, verified or applied."""


class SnapshotGone(WeightSyncError):
    """The snapshot's file has vanished, as it does when a newer version is finished. Wait for that one."""


class EngineUnfit(WeightSyncError):
    """An update failed after the first overwritten tensor. The engine refuses requests until it restarts."""


class EngineError(AsyncRLError):
    """The inference engine failed."""


class RewardError(AsyncRLError):
    """Rollouts get no reward, so there is nothing to train on."""


class LearnerError(AsyncRLError):
    """An optimizer step cannot be taken."""


def first_cause(error: BaseException) -> BaseException:
    """The first exception inside nested exception groups: what a TaskGroup's failure began with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_line(error: BaseException) -> str:
    """An exception as `Type: message` on one line of at most 500 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def last_line(error: BaseException) -> str:
    """The cause itself: an error's message may carry context, such as the end of a log, above it."""
    return (str(error).splitlines() or [type(error).__name__])[-1]
