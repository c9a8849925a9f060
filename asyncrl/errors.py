"""The exceptions that asyncrl raises on purpose.

    AsyncRLError
    |-- ConfigError        a key, its value, and what would be right   (also a ValueError; exit code 2)
    |-- DataError          a file, row or column that cannot be used   (also a ValueError; exit code 2)
    |-- WireError          a message that breaks the wire's schema     (also a ValueError)
    |-- PeerLost           a process at the other end is gone, or silent past its deadline
    |-- WeightSyncError    a version that cannot be published, verified or applied
    |-- EngineError        the engine refused, died, or answered nonsense
    `-- LearnerError       a step that cannot be taken (non-finite gradient, ranks that disagree)

Every message says what is wrong, the value, and what to do.
"""


class AsyncRLError(Exception):
    """Base of everything below."""


class ConfigError(AsyncRLError, ValueError):
    """The configuration cannot run. Raised before any process starts; the CLI exits with 2."""


class DataError(AsyncRLError, ValueError):
    """A data set cannot be used as it is. Raised before any engine starts; the CLI exits with 2."""


class WireError(AsyncRLError, ValueError):
    """A received message breaks the schema. The receiver refuses and counts it; it never dies of it."""


class PeerLost(AsyncRLError):
    """The process at the other end is gone or past its deadline."""


class WeightSyncError(AsyncRLError):
    """A policy version cannot be published, verified or applied."""


class EngineError(AsyncRLError):
    """The inference engine failed."""


class LearnerError(AsyncRLError):
    """An optimizer step cannot be taken."""
