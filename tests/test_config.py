"""The config tree: defaults, overrides, and every kind of mistake with its key, value and advice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config import Config, all_keys, dump_config, load_config, shared_digest
from asyncrl.config.advantage_presets import Peer
from asyncrl.config.advantages import OutcomeAdvantages
from asyncrl.config.corrections import ImportanceWeight
from asyncrl.config.loss_presets import PEERS, VALUE_PEERS
from asyncrl.config.losses import GspoLoss, PpoLoss
from asyncrl.config.recipes import RECIPES
from asyncrl.config.renames import ABSENT, RENAMES, VALUES
from asyncrl.config.table import nested_tables
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"


def test_tiny_yaml_is_what_all_defaults_together_give():
    assert load_config(CONFIGS / "tiny.yaml") == Config()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_survive_a_dump(path: Path, tmp_path: Path):
    config = load_config(path)
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config


def test_every_key_has_a_sentence_of_documentation():
    # Mutation: a key without a docstring, in a table however deep.
    tables = {table for _, table in leaves(Config)} | {Config}
    named_by_their_table = {
        (table, name) for table in tables for name, field in table.model_fields.items() if is_table(field)
    }
    undocumented = [
        f"{table.__name__}.{name}"
        for table in tables
        for name, field in table.model_fields.items()
        if not field.description and name != "type" and (table, name) not in named_by_their_table
    ]
    assert undocumented == []
    assert "algorithm.correction.weight.upper" in set(all_keys(Config))


def is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def test_overrides_win_over_the_file_and_numbers_without_a_dot_are_numbers():
    config = load_config(
        CONFIGS / "tiny.yaml",
        ["learner.lr=1e-6", "rollout.stop=[a, b]", "algorithm.correction={weight: null}"],
    )
    assert config.learner.lr == 1e-6
    assert config.rollout.stop == ("a", "b")
    assert config.algorithm.correction.weight is None
    assert config.learner.prompts_per_batch == 16
    [bounded] = [load_config(None, ["algorithm.correction.weight.upper=3"]).algorithm.correction.weight]
    assert bounded is not None
    assert bounded.upper == 3.0


def test_a_key_is_added_to_a_table_that_an_override_or_the_file_only_names(tmp_path: Path):
    # Mutations: only `algorithm` may be a name -> "advantages is 'rloo', not a table"; drop what the name stands for.
    critic = load_config(None, ["algorithm=ppo", "algorithm.critic.lr=2e-6"]).algorithm.critic
    assert critic is not None
    assert critic.lr == 2e-6
    file = tmp_path / "named.yaml"
    file.write_text("algorithm: {advantages: rloo, loss: {policy: gspo}}")
    algorithm = load_config(
        file, ["algorithm.advantages.gamma=0.9", "algorithm.loss.policy.clip_low=0.01"]
    ).algorithm
    assert isinstance(algorithm.advantages, OutcomeAdvantages)
    assert (algorithm.advantages.baseline, algorithm.advantages.gamma) == ("leave_one_out", 0.9)
    assert isinstance(algorithm.loss.policy, GspoLoss)
    assert (algorithm.loss.policy.clip_low, algorithm.loss.policy.clip_high) == (0.01, 4e-4)
    assert load_config(None, ["algorithm.loss.policy.clip_high=0.3"]).algorithm.loss.policy == PpoLoss(
        clip_high=0.3
    )


def test_an_override_that_would_undo_an_earlier_one_is_refused():
    # Mutations: let the later one win -> the critic's lr is the recipe's, and nothing says so; refuse equal keys too.
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["algorithm.critic.lr=2e-6", "algorithm=ppo"])
    assert str(caught.value) == (
        "algorithm=ppo: replaces the whole of algorithm, and algorithm.critic.lr=2e-6, which stands before it, would "
        "be lost; write algorithm=ppo first"
    )
    assert load_config(None, ["learner.lr=1", "learner.lr=2", "algorithm.type=rloo"]).learner.lr == 2


def test_a_text_that_looks_like_a_number_or_a_date_stays_that_text(tmp_path: Path):
    # Mutations: dump with YAML 1.1's rules -> 12e4 comes back as a number, in every process of the run; leave its
    # dates -> a run cannot be called by the day.
    config = load_config(None, ["run.name='12e4'", "run.project=2026-11-30", "rollout.stop=['1e5', '.5']"])
    assert (config.run.name, config.run.project) == ("12e4", "2026-11-30")
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("max_stalness=2", ["max_stalness", "did you mean max_staleness?"]),
        ("learner.ppo_mini_batch_size=4", ["ppo_mini_batch_size", "here it is learner.minibatches, train"]),
        ("actor_rollout_ref.rollout.n=4", ["actor_rollout_ref.rollout.n", "here it is rollout.group_size"]),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", ["val_kwargs.n", "here it is eval.num_samples"]),
        ("actor_rollout_ref.rollout.temperature=2", ["did you mean rollout.temperature?"]),
        ("worker.zygote=2", ["worker.zygote", "leave it out", "asyncrl schema"]),
        (
            "actor_rollout_ref.actor.use_kl_loss=true",
            ["use_kl_loss: unknown key; here it is algorithm.loss.kl, a table where there is one"],
        ),
        (
            "algorithm.kl_ctrl.kl_coef=0.1",
            ["kl_ctrl.kl_coef: unknown key; here it is algorithm.kl_reward.coef"],
        ),
        ("critic.model.path=x", ["critic.model.path: unknown key; here it is algorithm.critic.model"]),
        ("critic.optim.lr=1", ["critic.optim.lr: unknown key; here it is algorithm.critic.lr"]),
        (
            "algorithm.loss_type=grpo",
            ["algorithm.loss_type: unknown key; here it is algorithm.loss.aggregation.mode"],
        ),
        ("algorithm.adv_estimator=gae", ["adv_estimator: unknown key; here it is algorithm, a recipe"]),
        (
            "trainer.save_freq=5",
            ["trainer.save_freq: unknown key; here it is checkpoint.every"],
        ),
        ("lerner.lr=1", ["lerner: unknown key", "did you mean learner?"]),
        ("learner.group_size=4", ["learner.group_size", "did you mean rollout.group_size?"]),
        ("learner.lr=abc", ["learner.lr", "'abc'", "number"]),
        ("learner.lr=true", ["learner.lr", "True", "number"]),
        ("rollout.num_servers=1.5", ["rollout.num_servers", "1.5", "integer"]),
        ("rollout.temperature=0.009", ["rollout.temperature", "0.009", "greater than or equal to 0.01"]),
        ("rollout.temperature=.nan", ["rollout.temperature", "nan", "finite"]),
        ("learner.lr=.inf", ["learner.lr", "inf", "finite"]),
        ("timeouts.lease_s=.inf", ["timeouts.lease_s", "inf", "finite"]),
        ("algorithm.correction.weight.upper=.inf", ["algorithm.correction.weight.upper", "inf", "finite"]),
        ("rollout.engine_args={a: [.nan]}", ["rollout.engine_args", "nan", "finite"]),
        ("learner.betas=[0.9, 1.0]", ["learner.betas.1", "1.0", "less than 1"]),
        ("learner.betas=[-0.1, 0.9]", ["learner.betas.0", "-0.1", "greater than or equal to 0"]),
        ("rollout.top_p=0.9", ["rollout.top_p", "0.9", "1.0"]),
        ("rollout.top_k=5", ["rollout.top_k", "5", "train with 0"]),
        ("rollout.group_size=1", ["rollout.group_size 1", "at least 2"]),
        ("rollout.group_size=500", ["group_size 500", "max_num_seqs 128"]),
        ("rollout.max_groups_in_flight=99", ["max_groups_in_flight 99", "max_num_seqs"]),
        ("algorithm=PPO", ["algorithm: 'PPO' is no recipe (did you mean 'ppo'?)"]),
        ("algorithm=pp0", ["algorithm: 'pp0' is no recipe (did you mean 'ppo'?)", "grpo", "module:attr"]),
        ("algorithm=no_such_module:recipe", ["algorithm: ", "no_such_module", "ModuleNotFoundError"]),
        ("algorithm.advantages=rlo", ["algorithm.advantages: 'rlo' is no estimator (did you mean 'rloo'?)"]),
        ("algorithm.stages=[score, advantag, loss]", ["'advantag' is no stage (did you mean 'advantage'?)"]),
        ("algorithm.stages=[advantage, loss, update]", ["'loss' needs 'score' before it"]),
        (
            "algorithm.stages=[score, advantage, correct, loss, 'a:b', update]",
            ["stage 'a:b' runs once a batch, before 'loss'; put it there"],
        ),
        (
            "algorithm.stages=[score, advantage, loss, update, correct]",
            ["'correct' runs once a batch, before"],
        ),
        (
            "algorithm.stages=[score, correct, advantage, loss, update]",
            ["'correct' needs 'advantage' before"],
        ),
        (
            "algorithm.loss.policy.function=mine",
            [
                "policy.function: unknown key of type ppo; custom has it, and ppo has: anchor, clip_high, clip_low"
            ],
        ),
        (
            "algorithm.loss.policy={type: cispo, clip_high: 5}",
            [
                "clip_high: unknown key of type cispo; ppo, gspo, gmpo, clip_cov have it, and cispo has: anchor"
            ],
        ),
        ("algorithm.advantages.lam=0.95", ["advantages.lam: unknown key of type outcome; gae has it"]),
        (
            "algorithm.advantages={type: custom, function: 'a:b', margin: 1}",
            [
                "advantages.margin: unknown key; arguments of the function stand in algorithm.advantages.options"
            ],
        ),
        (
            "algorithm.correction.rejections=[{type: m2po, upper: 0.1}]",
            ["rejections.0.upper: unknown key of type m2po; bounds has it, and m2po has: threshold, type"],
        ),
        (
            "reward_model.overlong_buffer.len=4",
            ["overlong_buffer.len: unknown key; here it is algorithm.shaping.overlong.buffer_tokens"],
        ),
        ("algorithm.filter_groups.enable=true", ["unknown key; here it is algorithm.filter.keep, spread"]),
        ("peft_config.r=8", ["peft_config.r: unknown key; here it is learner.lora.rank"]),
        ("algorithm.loss.policy=GSPO", ["policy: 'GSPO' is no type (did you mean 'gspo'?); there are ppo, "]),
        ("algorithm.loss.policy=geo_mean", ["policy: 'geo_mean' is called otherwise here; use gmpo"]),
        ("algorithm.loss.kl.estimator=low_var_kl", ["kl.estimator: 'low_var_kl' is called", "use k3"]),
        ("algorithm=gae", ["algorithm: 'gae' is called otherwise here; use ppo"]),
        (
            "algorithm.loss.kl=0.001",
            ["loss.kl: 0.001: must be a table of clamp_estimate, clamp_log_ratio, coef"],
        ),
        ("algorithm.advantages=[grpo]", ["advantages: ('grpo',): must be a table (From rewards to"]),
        (
            "learner.lora.target_modules=q_proj",
            ["target_modules: 'q_proj': must be a list, such as [q_proj]"],
        ),
        ("algorithm.loss.policy.clip_high='0.3'", ["clip_high: '0.3' is a text; write the number without"]),
        ("resources.cores=3", ["resources.cores: 3"]),
        (
            "algorithm.stages=[score, reference, advantage, kl_reward, correct, loss, update]",
            ["'advantage' reads what 'kl_reward' leaves and stands before it; swap them"],
        ),
        ("algorithm.loss.policy={type: cispo, ratio_min: 6}", ["ratio_min 6.0 is above ratio_max 5.0"]),
        ("algorithm.loss.policy={type: clip_cov, lowest: 5}", ["lowest 5.0 is not below highest 5.0"]),
        ("algorithm.loss.policy={type: custom, function: mine}", ["policy.function: 'mine'", "module:NAME"]),
        ("algorithm.preset=trll", ["algorithm.preset: 'trll' (did you mean 'trl'?)", "'verl'"]),
        ("algorithm.filter={keep: mean_between, between: [1, 0]}", ["algorithm.filter: between (1.0, 0.0)"]),
        ("mode=colocated", ["mode", "colocated", "not built yet", "disaggregated"]),
        ("launcher=ray", ["launcher", "ray", "not built yet"]),
        ("over_age=wait", ["over_age", "wait", "'mask', 'keep'"]),
        ("weight_sync.transport=nccl", ["weight_sync.transport", "nccl", "'shm'"]),
        ("weight_sync.kv_on_update=reset", ["weight_sync.kv_on_update", "reset", "'keep'"]),
        ("learner.minibatches=17", ["learner.minibatches 17", "learner.prompts_per_batch 16"]),
        ("checkpoint.every=-1", ["checkpoint.every", "-1", "greater than or equal to 0"]),
        ("checkpoint.keep=0", ["checkpoint.keep", "0", "greater than or equal to 1"]),
        ("stream.keys_dir=keys", ["stream.keys_dir", "keys", "not built yet"]),
        ("timeouts.ready_s=5", ["timeouts.ready_s", "5", "not built yet", "use 60.0"]),
        ("run.trackers=[wandbb]", ["run.trackers", "wandbb", "tensorboard"]),
        ("stream.bind=0.0.0.0", ["stream.bind", "0.0.0.0", "127.0.0.1"]),
        ("stream.bind=myhost", ["stream.bind", "myhost", "IP address"]),
        ("run.name=../../x", ["run.name", "../../x"]),
        ("resources.cores={lerner: [0]}", ["resources.cores", "lerner", "learner"]),
        ("resources.cores={learner: []}", ["resources.cores", "learner has no core"]),
        ("nonsense", ["nonsense", "key.path=value"]),
        ("reward=[{weight: 2}]", ["reward.0.name: missing from {'weight': 2} (exact_match, "]),
    ],
)
def test_a_mistake_names_the_key_the_value_and_what_would_be_right(override: str, says: list[str]):
    # Mutations: the keys of all types of a union in place of one's -> "did you mean" the same key again; pydantic's
    # own words of a tag, a table, a list; the nearest key of verl's table before the names that its keys have here.
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.advantages=gae"],
            "algorithm.advantages: gae reads the values of a critic; use the recipe ppo",
        ),
        (
            ["algorithm=ppo", "algorithm.advantages=grpo"],
            "algorithm.critic: advantages of type outcome give a critic no",
        ),
        (
            ["algorithm=ppo", "algorithm.critic.coef=0.5"],
            "algorithm.critic.coef: a critic of its own is trained by",
        ),
        (
            ["algorithm=ppo", "algorithm.critic={shared: true, warmup_versions: 3}"],
            "algorithm.critic.warmup_versions: a shared critic trains with the policy's loss",
        ),
        (
            ["algorithm.critic={}", "algorithm.advantages=otb"],
            "algorithm.critic: the stages of 'grpo' lack 'critic'",
        ),
        (
            ["algorithm.stages=[score, advantage, loss, update]", "algorithm.filter.keep=spread"],
            "algorithm.filter.keep: the stages of 'grpo' lack 'filter'; add it",
        ),
        (
            ["algorithm.stages=[score, advantage, loss, update]"],
            "algorithm.correction: the stages of 'grpo' lack 'correct'; add it, or set correction: {weight: null}",
        ),
        (
            ["algorithm.correction.proximal=bypass"],
            "algorithm.correction.weight: with correction.proximal bypass the ratio of a ppo loss",
        ),
        (
            ["algorithm.loss.policy={type: cispo, anchor: rollout}"],
            "algorithm.correction.weight: with loss.policy.anchor rollout the ratio of a cispo loss",
        ),
        (
            ["algorithm.loss.policy=vespo", "algorithm.correction.preset=bypass_pg_is"],
            "algorithm.correction.weight: with correction.proximal bypass the ratio of a vespo loss",
        ),
        (["algorithm.reference.model=x"], "algorithm.reference.model: nothing reads a reference model"),
        (["algorithm.reference.refresh_every=3"], "algorithm.reference.refresh_every: nothing reads"),
        (
            ["algorithm.kl_reward={}", "algorithm.advantages=gdpo"],
            "algorithm.kl_reward: advantages of type gdpo have no place for it; set loss.kl instead",
        ),
        (
            ["algorithm.loss={policy: kl_cov, top_entropy_share: 0.2}"],
            "algorithm.loss.top_entropy_share: kl_cov selects tokens itself",
        ),
        (
            ["algorithm.loss.ptx.positive_coef=1", "algorithm.correction.preset=decoupled_k3_rs"],
            "algorithm.loss.ptx.positive_coef: its count is known before the correction",
        ),
        (
            ["algorithm.loss.ptx.coef=0.5"],
            "algorithm.loss.ptx.coef 0.5 has no supervised tokens; name a data set in data.supervised",
        ),
        (
            ["data.supervised=[x.jsonl, y.jsonl]"],
            "data.supervised: x.jsonl, y.jsonl is never trained with algorithm.loss.ptx.coef 0",
        ),
        (
            ["algorithm.loss.ptx.rows_per_minibatch=4"],
            "algorithm.loss.ptx.rows_per_minibatch: 4 rows are never taken with loss.ptx.coef 0",
        ),
        (
            ["data.max_supervised_tokens=9"],
            "data.max_supervised_tokens 9 bounds nothing without data.supervised",
        ),
        (
            ["algorithm=dapo", "rollout.group_size=1", "algorithm.advantages=reinforce"],
            "algorithm.filter.keep spread leaves out every group of rollout.group_size 1",
        ),
        (
            ["learner.lora={}", "algorithm.loss.kl={}", "algorithm.reference.refresh_every=2"],
            "algorithm.reference.refresh_every 2: with learner.lora the reference has no adapters",
        ),
        (
            ["algorithm=dapo", "algorithm.shaping.overlong.buffer_tokens=9"],
            "algorithm.shaping.overlong.buffer_tokens 9 exceeds rollout.max_completion_tokens 8",
        ),
        (
            ["algorithm=dapo", "algorithm.shaping.overlong.max_tokens=10"],
            "algorithm.shaping.overlong.max_tokens 10 punishes answers of more than 8 tokens",
        ),
        (
            ["algorithm.shaping={rescale: {}, truncated_factor: 0.5}"],
            "algorithm.shaping.truncated_factor: 0.5 of a reward below 0",
        ),
        (
            ["algorithm.filter.between=[0.2, 0.8]"],
            "algorithm.filter.between: filter.keep all does not read it; set filter.keep: mean_between",
        ),
        (
            ["algorithm.filter={keep: mean_between, tolerance: 0.1}"],
            "algorithm.filter.tolerance: filter.keep mean_between does not read it; set filter.keep: spread",
        ),
        (["algorithm.filter.metric=exact_match"], "algorithm.filter.metric: filter.keep all does not read"),
        (["algorithm.kl_reward={target: 0.05}"], "algorithm.kl_reward.target: a fixed coefficient has none"),
        (
            ["algorithm.kl_reward={type: adaptive, horizon: 25.6}"],
            "algorithm.kl_reward.horizon 25.6: a batch of 128 trajectories could make the coefficient 0",
        ),
        (
            ["algorithm.loss.aggregation.length=100"],
            "algorithm.loss.aggregation.length: token-mean does not read it",
        ),
        (
            ["algorithm=ppo", "algorithm.critic.loss.aggregation.length=100"],
            "algorithm.critic.loss.aggregation.length: token-mean does not read it",
        ),
        (
            ["algorithm=ppo", "algorithm.critic.loss.huber_delta=1.0"],
            "algorithm.critic.loss.huber_delta: a squared error has none",
        ),
        (
            ["algorithm=ppo", "algorithm.critic.warmup_versions=60"],
            "algorithm.critic.warmup_versions 60 leaves none of learner.max_versions 60",
        ),
        (
            ["algorithm.kl_reward={}", "algorithm.advantages={kl_credit: own_token, gamma: 0.9}"],
            "algorithm.advantages.gamma: 0.9 moves credit from token to token",
        ),
        (
            ["algorithm.advantages={kl_credit: own_token, gaps: cut}"],
            "algorithm.advantages.gaps: cut moves credit from token to token",
        ),
        (
            ["algorithm.advantages={baseline: none, scale: std}"],
            "algorithm.advantages.baseline: with none a deviation can be 0",
        ),
        (
            ["algorithm=remax", "algorithm.advantages.scale=std"],
            "algorithm.advantages.baseline: with greedy a deviation can be 0",
        ),
        (
            ["algorithm.advantages={baseline_over: batch}"],
            "algorithm.advantages.baseline_over: with batch and scale_over group a deviation can be 0",
        ),
        (
            ["algorithm.advantages={deviation: leave_one_out}"],
            "algorithm.advantages.deviation: with leave_one_out a deviation can be 0",
        ),
        (
            ["algorithm.advantages={type: gdpo, deviation: leave_one_out}"],
            "algorithm.advantages.deviation: with leave_one_out a deviation can be 0",
        ),
        (
            ["algorithm.stages=[score, advantage, loss, update]"],
            "algorithm.correction: the stages of 'grpo' lack 'correct'; add it, or set correction",
        ),
        (
            ["algorithm=remax", "rollout={max_groups_in_flight: 16, group_size: 8}"],
            "rollout.max_groups_in_flight 16 x group_size 8 (+ 1 greedy) exceeds rollout.max_num_seqs 128",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_each_other_are_refused_by_key(overrides: list[str], says: str):
    # Mutation: drop any of the questions of config/contradictions.py.
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss.policy=reinforce", "algorithm.correction.preset=bypass_pg_is"],
        ["algorithm.loss.policy={anchor: learner}", "algorithm.correction.proximal=bypass"],
        ["algorithm.correction.preset=bypass_ppo_clip"],
        ["algorithm=ppo", "algorithm.critic={shared: true, coef: 0.5}"],
        ["algorithm.reference.refresh_every=3", "algorithm.loss.kl={}"],
        ["algorithm=ppo", "algorithm.kl_reward={clip_reward: 5}"],
        ["algorithm=dapo", "algorithm.shaping.overlong={max_tokens: 9, buffer_tokens: 2}"],
        ["algorithm.shaping={rescale: {target: [0, 2]}, truncated_factor: 0.5}"],
        ["algorithm.kl_reward={type: adaptive, horizon: 25.7}"],
        ["algorithm.advantages={baseline: none, scale: std, epsilon_form: where_positive}"],
        ["algorithm.advantages={baseline_over: batch, scale_over: batch}"],
        ["algorithm.advantages={scale_over: batch}"],
        ["algorithm.stages=[score, advantage, loss, update]", "algorithm.correction.weight=null"],
        ["rollout={max_groups_in_flight: 16, group_size: 8}"],
    ],
    ids=" ".join,
)
def test_options_that_only_look_like_a_contradiction_are_taken(overrides: list[str]):
    # Mutation: refuse every weight under bypass.
    load_config(None, overrides)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("{'stages': ()}", r"is a dict; name a Recipe"),
        ("Recipe('grpo')", r"has the stages 'grpo'; write a tuple of names"),
        (
            "Recipe(('score', print, 'loss'))",
            r"has the stages .*; write a tuple of names, your own as module:attr",
        ),
        ("Recipe(options=None)", r"has the options None; write a dict"),
        (
            "Recipe(options={'type': 'ppo'})",
            r"write a dict of the tables of `algorithm`, without type and stages",
        ),
        ("Recipe(options={'loss': {'policy': print}})", r"no plain data .*; name a function as module:attr"),
        ("Recipe(options={'los': {}})", r"^algorithm\.los: unknown key; did you mean algorithm\.loss\?"),
        (
            "Recipe(options={'advantages': {'epsilon': 'x'}})",
            r"^algorithm\.advantages\.epsilon: 'x': Input should",
        ),
        (
            "Recipe(('score', 'advantage', 'loss', 'update'))",
            r"^algorithm\.correction: the stages of .* lack 'corr",
        ),
    ],
)
def test_a_mistake_in_a_recipe_of_ones_own_is_said_by_its_key(recipe: str, says: str, tmp_path: Path):
    # Mutations: look for the key in the user's tree alone -> "algorithm: unknown key"; let pydantic find the function.
    file = tmp_path / "mine.py"
    file.write_text(f"from asyncrl.config.recipes import Recipe\nrecipe = {recipe}\n")
    with pytest.raises(ConfigError, match=says):
        load_config(None, [f"algorithm={file}:recipe"])


def test_a_constant_length_left_to_the_rollout_is_resolved_for_the_policy_and_for_a_critic():
    # Mutation: resolve the policy's alone -> the critic's first step ends the run.
    mode = "seq-mean-token-sum-norm"
    overrides = [f"algorithm.loss.aggregation.mode={mode}", f"algorithm.critic.loss.aggregation.mode={mode}"]
    config = load_config(None, ["algorithm=ppo", "rollout.max_completion_tokens=12", *overrides])
    resolved = config.resolved_algorithm
    assert resolved.critic is not None
    assert resolved.loss.aggregation.length == resolved.critic.loss.aggregation.length == 12.0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "preset", ["verl", "trl", "trl_async", "openrlhf", "nemo", "skyrl", "open_instruct", "torchrl"]
)
def test_every_recipe_loads_with_every_peers_conventions_and_survives_a_dump(
    recipe: str, preset: str, tmp_path: Path
):
    # Mutations: another name of a peer for one part -> that part has no preset; put the preset over the recipe's
    # own options, or over those of a dump -> what comes back differs.
    if (recipe, preset) == ("decoupled_ppo", "trl_async"):
        pytest.skip("three policies, and a ratio to the sampler: refused, as the test above holds")
    config = load_config(None, [f"algorithm={recipe}", f"algorithm.preset={preset}"])
    algorithm = config.algorithm
    assert algorithm.advantages.preset == algorithm.loss.preset == preset
    own = "areal" if recipe == "decoupled_ppo" else preset
    assert algorithm.correction.preset == own
    if algorithm.critic is not None and preset in VALUE_PEERS:
        assert algorithm.critic.loss.preset == preset
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config


@pytest.mark.parametrize("peer", get_args(Peer))
def test_every_peer_has_conventions_of_advantages_and_losses(peer: str):
    # Mutation: a peer that one part calls otherwise.
    algorithm = load_config(None, [f"algorithm.preset={peer}"]).algorithm
    assert algorithm.advantages.preset == algorithm.loss.preset == peer
    assert peer in PEERS
    assert set(VALUE_PEERS) <= set(get_args(Peer)) == set(PEERS)


def test_a_preset_changes_what_is_computed_and_what_is_written_beside_it_wins():
    # Mutations: take a preset and use none of it; let it win over what was written.
    plain, verl = (load_config(None, o).algorithm for o in ([], ["algorithm.preset=verl"]))
    assert isinstance(verl.loss.policy, PpoLoss)
    assert isinstance(verl.advantages, OutcomeAdvantages)
    assert (verl.loss.policy.dual_clip, verl.advantages.group_of_one) == (3.0, "reward")
    assert plain.loss.policy == PpoLoss()
    own = load_config(None, ["algorithm.preset=verl", "algorithm.loss.policy.dual_clip=null"]).algorithm
    assert own.loss.policy == PpoLoss()
    # verl's own default, rollout_is: null, is no weight; what its rollout_is: token says has a name of its own.
    assert plain.correction.weight == ImportanceWeight(level="token", upper=2.0)
    assert verl.correction.weight is None
    on = ["algorithm.preset=verl", "algorithm.correction.preset=decoupled_token_is"]
    assert load_config(None, on).algorithm.correction.weight == plain.correction.weight
    trl = load_config(None, ["algorithm.preset=trl", "algorithm.advantages.epsilon=0.5"]).algorithm.advantages
    assert isinstance(trl, OutcomeAdvantages)
    assert trl.epsilon == 0.5
    openrlhf = ["algorithm.preset=openrlhf", "algorithm.loss.ptx.rows_per_minibatch=4"]
    ptx = load_config(None, [*openrlhf, "data.supervised=x.jsonl"]).algorithm.loss.ptx
    assert (ptx.coef, ptx.rows_per_minibatch) == (0.05, 4)
    assert load_config(None, ["algorithm.preset=openrlhf"]).algorithm.loss.ptx.coef == 0.0
    nemo = load_config(None, ["algorithm=ppo", "algorithm.preset=nemo"]).algorithm
    assert nemo.critic is not None
    assert nemo.critic.loss.clip is None


def mistakes_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value).splitlines()


def test_all_mistakes_are_reported_at_once():
    # Mutation: a table of another framework is one mistake -> its keys are not told what they are here.
    assert len(mistakes_of("max_stalness=2", "learner.lr=abc")) == 2
    assert len(mistakes_of("trainer.test_freq=5", "trainer.logger=[wandb]", "trainer.v1.x=1")) == 3


@pytest.mark.parametrize("key", ["reward", "data.train"])
def test_a_mistake_in_a_list_is_one_mistake(key: str):
    # Mutation: also say what pydantic makes of it -> "Tuple should have at least 1 item", which it has.
    [mistake] = mistakes_of(f"{key}=[{{path: x, name: x, wieght: 2}}]")[1:]
    assert f"{key}.0.wieght: unknown key; did you mean {key}.weight?" in mistake
    [empty] = mistakes_of(f"{key}=[]")
    assert f"{key}: " in empty
    assert "at least 1 item" in empty


@pytest.mark.parametrize(("written", "here"), VALUES.items())
def test_a_value_of_another_framework_is_refused_with_one_that_is_right_here(written: str, here: str):
    # Mutations: drop a value -> the nearest name, which is another thing; name one that does not exist here.
    word, _, value = written.partition("=")
    key = {
        "algorithm": "algorithm",
        "advantages": "algorithm.advantages",
        "policy": "algorithm.loss.policy",
        "estimator": "algorithm.loss.kl.estimator",
    }[word]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}={value}"])
    assert str(caught.value).endswith(f": {value!r} is called otherwise here; use {here}")
    usable = here if here.startswith("{") else here.partition(",")[0]
    recipe = ["algorithm=ppo", "algorithm.critic={}"] if usable == "otb" else []
    load_config(None, [*recipe, f"{key}={usable}"])


@pytest.mark.parametrize("here", sorted(set(RENAMES.values())))
def test_a_renamed_key_exists(here: str):
    # Mutation: rename a key of the tree, or misspell one in the table.
    names = here.partition(",")[0].split(" and ")
    assert [name for name in names if name not in set(all_keys(Config))] == []


def test_what_is_said_of_a_key_without_a_counterpart_names_keys_that_exist():
    # Mutations: misspell a key in what is said; put a key into both tables, or one that exists here into this one.
    keys = set(all_keys(Config))
    named = {word for said in ABSENT.values() for word in re.findall(r"[a-z]+\.[a-z_]+", said)}
    assert named - keys == {"metrics.jsonl"}
    assert not set(ABSENT) & (set(RENAMES) | keys | {key.rpartition(".")[2] for key in keys})


@pytest.mark.parametrize(
    "override",
    [
        "data.train=3",
        "data.train=[{path: x, wieght: 2}]",
        "data.train={path: x, weight: 0}",
        "data.train={}",
        "data.train=[]",
        "data.train=",
        "reward=[]",
        "reward=[3]",
    ],
)
def test_one_mistake_in_a_list_is_one_line_beside_another_mistake(override: str):
    # Mutations: min_length=1 in place of not_empty (a wrong item is then also an empty list); the
    # documentation of a key with its line breaks.
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override, "max_stalness=2"])
    first, second = str(caught.value).splitlines()
    assert first.startswith(override.partition("=")[0])
    assert second == "max_stalness: unknown key; did you mean max_staleness?"


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "not YAML"), ("- 1", "list"), ("seed: 1\nseed: 2", "twice"), ("learner: 3", "learner")],
)
def test_a_file_that_is_not_a_config_is_refused(text: str, says: str, tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["num_ranks=3", "tensor_parallel_size=2"], r"num_ranks: 3 is not a multiple of replicas 1 x .* 2$"),
        (
            ["num_ranks=4", "replicas=4", "tensor_parallel_size=2"],
            "num_ranks: 4 is not a multiple of replicas 4 x",
        ),
        (
            ["num_ranks=3", "replicas=2"],
            "num_ranks: 3 is not a multiple of replicas 2 x tensor_parallel_size 1",
        ),
        (
            ["num_ranks=2", "tensor_parallel_size=2", "lora={rank: 4}"],
            "lora: not built for tensor_parallel_size 2",
        ),
        (["num_ranks=2", "tensor_parallel_size=2", "compile=true"], "compile: not built for"),
        (["num_ranks=2", "tensor_parallel_size=2", "offload=true"], "offload: not built for"),
    ],
)
def test_ranks_that_cannot_share_layers_are_refused(overrides: list[str], says: str):
    # Mutation: compare num_ranks with one of the two factors.
    with pytest.raises(ConfigError, match=rf"^learner\.{says}"):
        load_config(None, [f"learner.{override}" for override in overrides])


def test_a_tensor_group_is_one_data_rank_of_neighbours():
    # Mutation: rank % tensor_parallel_size (ranks 0 and 2 would share layers).
    overrides = ["num_ranks=8", "replicas=2", "tensor_parallel_size=2"]
    learner = load_config(None, [f"learner.{override}" for override in overrides]).learner
    assert learner.num_data_ranks == 4
    assert [learner.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    # Mutation: catch only what open raises -> UnicodeDecodeError without the file's name.
    (tmp_path / "model.safetensors").write_bytes(b"\x80\xff")
    with pytest.raises(ConfigError, match=r"model\.safetensors: is no text .*; name a YAML file"):
        load_config(tmp_path / "model.safetensors")


def test_the_shared_digest_ignores_what_each_side_may_choose_and_nothing_else():
    base = shared_digest(Config())
    for own in ("run.name=x", "rollout.num_servers=3", "timeouts.lease_s=5", "rollout.kv_cache_gib=2"):
        assert shared_digest(load_config(None, [own])) == base
    for shared in ("rollout.temperature=0.5", "model=x", "seed=1", "rollout.group_size=4", "reward=a:b"):
        assert shared_digest(load_config(None, [shared])) != base


ONLY_SHOWN = {"check.py", "launch/preflight.py"}
"""Their reading a key gives it no effect on a run."""
READ_BY_THE_TREE = {
    "algorithm.preset",
    "algorithm.advantages.preset",
    "algorithm.loss.preset",
    "algorithm.correction.preset",
    "algorithm.critic.loss.preset",
    "algorithm.advantages.whiten_over",
}
"""Presets choose other options while the tree is made (test_a_preset_changes_what_is_computed); the other is read by a
property of its table (tests/algorithms/test_outcome_advantages.py)."""
REFUSED_WHEN_CHANGED = {
    "mode": "colocated",
    "launcher": "ray",
    "rollout.engine": "transformers",
    "rollout.top_p": "0.9",
    "rollout.top_k": "5",
    "weight_sync.transport": "nccl",
    "weight_sync.verify": "none",
    "weight_sync.kv_on_update": "reset",
    "stream.insecure": "true",
    "stream.keys_dir": "keys",
    "timeouts.ready_s": "5",
}


def leaves(table: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, the table it is in) of every key that is not a table."""
    for name, field in table.model_fields.items():
        nested = list(nested_tables(field.annotation))
        for inner in nested:
            yield from leaves(inner, f"{path}{name}.")
        if not nested:
            yield path + name, table


def names_in(source: str) -> tuple[set[tuple[str, str]], set[str]]:
    """The (owner, attribute) pairs that are read, as in `config.rollout.stop` -> (rollout, stop); all names."""
    pairs, names = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            pairs.add((name.lstrip("_"), node.attr))
    return pairs, names


def test_every_key_has_an_effect_or_is_refused_when_it_is_changed():
    # Mutation: add a key to any table that nothing reads -> it is listed here. Stop reading one
    # (learner.warmup_versions, say) -> the same.
    package = ROOT / "asyncrl"
    sources = [
        names_in(path.read_text())
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "config"
        and path.relative_to(package).as_posix() not in ONLY_SHOWN
    ]

    def is_read(key: str, table: type[BaseModel]) -> bool:
        owner, _, leaf = f"config.{key}".rpartition(".")
        owner = owner.rpartition(".")[2]
        owners = {owner, owner.removesuffix("s")}  # one of a list
        # A table's inherited keys may be read where only the base is named.
        bases = {base.__name__ for base in table.__mro__ if leaf in getattr(base, "model_fields", {})} - {
            "Config"
        }
        return any(
            any((name, leaf) in pairs for name in owners)
            or any(base in names and any(leaf == attr for _, attr in pairs) for base in bases)
            for pairs, names in sources
        )

    unread = {key for key, table in leaves(Config) if not is_read(key, table)}
    tags = {key for key in unread if key.endswith(".type")}  # isinstance tells these tables apart
    assert unread - tags - READ_BY_THE_TREE == set(REFUSED_WHEN_CHANGED)
    assert unread >= READ_BY_THE_TREE


@pytest.mark.parametrize(("key", "value"), list(REFUSED_WHEN_CHANGED.items()))
def test_a_key_without_effect_cannot_be_changed(key: str, value: str):
    # Mutation: drop the key's validator -> the value is taken and ignored.
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        load_config(None, [f"{key}={value}"])
