"""The config tree: defaults, overrides, and every kind of mistake with its key, value and advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.config_file import all_keys, dump_config, load_config, shared_digest
from asyncrl.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def test_tiny_yaml_is_what_all_defaults_together_give():
    assert load_config(CONFIGS / "tiny.yaml") == Config()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_survive_a_dump(path: Path, tmp_path: Path):
    config = load_config(path)
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config


def test_every_key_has_a_sentence_of_documentation():
    def undocumented(table, prefix=""):
        for name, field in table.model_fields.items():
            if not field.description and name not in ("type", *NAMED_BY_THEIR_TABLE):
                yield prefix + name

    NAMED_BY_THEIR_TABLE = {  # tables are documented by their class docstring
        name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
    }
    tables = [
        Config,
        *(f.annotation for f in Config.model_fields.values() if hasattr(f.annotation, "model_fields")),
    ]
    assert [key for table in tables for key in undocumented(table)] == []
    assert "algorithm.correction.cap" in set(all_keys(Config))


def test_overrides_win_over_the_file_and_numbers_without_a_dot_are_numbers():
    config = load_config(
        CONFIGS / "tiny.yaml",
        ["learner.lr=1e-6", "rollout.stop=[a, b]", "algorithm.correction={type: none}"],
    )
    assert config.learner.lr == 1e-6
    assert config.rollout.stop == ("a", "b")
    assert config.algorithm.correction.type == "none"
    assert config.learner.prompts_per_batch == 16


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("max_stalness=2", ["max_stalness", "did you mean max_staleness?"]),
        ("learner.group_size=4", ["learner.group_size", "did you mean rollout.group_size?"]),
        ("learner.lr=abc", ["learner.lr", "'abc'", "number"]),
        ("learner.lr=true", ["learner.lr", "True", "number"]),
        ("rollout.num_servers=1.5", ["rollout.num_servers", "1.5", "integer"]),
        ("rollout.temperature=0", ["rollout.temperature", "0", "greater than 0"]),
        ("rollout.top_p=0.9", ["rollout.top_p", "0.9", "1.0"]),
        ("rollout.top_k=5", ["rollout.top_k", "5", "train with 0"]),
        ("rollout.group_size=1", ["rollout.group_size 1", "at least 2"]),
        ("rollout.group_size=500", ["group_size 500", "max_num_seqs 128"]),
        ("rollout.max_groups_in_flight=99", ["max_groups_in_flight 99", "max_num_seqs"]),
        ("algorithm=ppo", ["algorithm", "'ppo'", "grpo"]),
        ("mode=colocated", ["mode", "colocated", "not built yet", "disaggregated"]),
        ("launcher=ray", ["launcher", "ray", "not built yet"]),
        ("over_age=wait", ["over_age", "wait", "'mask', 'keep'"]),
        ("weight_sync.transport=nccl", ["weight_sync.transport", "nccl", "'shm'"]),
        ("weight_sync.kv_on_update=reset", ["weight_sync.kv_on_update", "reset", "'keep'"]),
        ("learner.epochs=2", ["learner.epochs", "2", "not built yet"]),
        ("checkpoint.every=5", ["checkpoint.every", "5", "not built yet"]),
        ("eval.every=5", ["eval.every", "5", "not built yet"]),
        ("run.trackers=[wandb]", ["run.trackers", "wandb", "not built yet"]),
        ("stream.bind=0.0.0.0", ["stream.bind", "0.0.0.0", "127.0.0.1"]),
        ("stream.bind=myhost", ["stream.bind", "myhost", "IP address"]),
        ("run.name=../../x", ["run.name", "../../x"]),
        ("resources.cores={lerner: [0]}", ["resources.cores", "lerner", "learner"]),
        ("resources.cores={learner: [4096]}", ["resources.cores", "4096"]),
        ("nonsense", ["nonsense", "key.path=value"]),
    ],
)
def test_a_mistake_names_the_key_the_value_and_what_would_be_right(override: str, says: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for part in says:
        assert part in str(caught.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["max_stalness=2", "learner.lr=abc"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "not YAML"), ("- 1", "list"), ("seed: 1\nseed: 2", "twice"), ("learner: 3", "learner")],
)
def test_a_file_that_is_not_a_config_is_refused(text: str, says: str, tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_the_shared_digest_ignores_what_each_side_may_choose_and_nothing_else():
    base = shared_digest(Config())
    for own in ("run.name=x", "rollout.num_servers=3", "timeouts.lease_s=5", "rollout.kv_cache_gib=2"):
        assert shared_digest(load_config(None, [own])) == base
    for shared in ("rollout.temperature=0.5", "model=x", "seed=1", "rollout.group_size=4", "reward=a:b"):
        assert shared_digest(load_config(None, [shared])) != base
