"""The typed configuration tree: every key, its default, its unit.

The defaults together run offline (model `tiny`, task `rev4`). Unknown keys are refused, and so is a value
that names something not built yet: `load_config` turns YAML and dotted overrides into a `Config`, or one
ConfigError that lists every mistake.

tree.py       the whole of it, and the combinations of keys that it refuses
algorithm.py  rollout.py  learner.py  system.py    the tables
file.py       YAML and overrides -> Config        mistakes.py  renames.py    what is said of each mistake
reference.py  every key as a page             identity.py  what a resumed run must have as before
"""

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.file import dump_config, load_config, shared_digest, validate_config
from asyncrl.config.identity import changed_keys, learner_kind, own_options, run_identity
from asyncrl.config.learner import CheckpointConfig, LearnerConfig
from asyncrl.config.reward import RewardConfig
from asyncrl.config.rollout import DataConfig, EvalConfig, RolloutConfig, SourceConfig
from asyncrl.config.system import ResourcesConfig, RunConfig, StreamConfig, TimeoutsConfig, WeightSyncConfig
from asyncrl.config.table import all_keys
from asyncrl.config.tree import Config

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LearnerConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "StreamConfig",
    "TimeoutsConfig",
    "WeightSyncConfig",
    "all_keys",
    "changed_keys",
    "dump_config",
    "learner_kind",
    "load_config",
    "own_options",
    "run_identity",
    "shared_digest",
    "validate_config",
]
