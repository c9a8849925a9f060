"""`asyncrl.Trainer`: what a script hands over becomes a configuration that other processes can read."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl import ConfigError, Trainer
from asyncrl.config import Config, load_config
from asyncrl.config.advantages import CustomAdvantages, OutcomeAdvantages
from asyncrl.config.losses import CustomLoss
from asyncrl.config.recipes import RECIPES, Recipe
from asyncrl.errors import DataError
from asyncrl.launch import model_facts
from asyncrl.launch import run as run_module
from asyncrl.launch.preflight import check_config
from asyncrl.models.source import resolve_model
from asyncrl.models.tiny import build_model, build_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))


def counted(function: Callable[..., float]) -> Callable[..., float]:
    return functools.wraps(function)(lambda *args: function(*args))


def brevity(completion: str, row: dict[str, Any]) -> float:
    return -float(len(completion))


@counted
def decorated(completion: str, row: dict[str, Any]) -> float:
    return 1.0


def twice(completion: str, row: dict[str, Any]) -> float:
    return 1.0


first_of_two = twice


def twice(completion: str, row: dict[str, Any]) -> float:
    return 2.0


def test_nothing_given_is_what_all_defaults_together_give():
    # Mutation: put tables with None in them -> validation fails.
    config = Trainer().config
    assert (config.model, config.data.train[0].path, config.reward[0].name) == ("tiny", "rev4", "exact_match")


def test_functions_become_the_file_and_name_they_are_imported_from():
    # Mutation: use __module__ -> `tests.test_trainer`, which a reward's process cannot import.
    config = Trainer(reward_funcs=[brevity, "exact_match"], train_dataset="sort4").config
    assert [reward.name for reward in config.reward] == [f"{Path(__file__).resolve()}:brevity", "exact_match"]
    assert config.data.train[0].path == "sort4"


@pytest.mark.parametrize(
    "function",
    [
        lambda completion, row: 0.0,
        (lambda: lambda c, r: 1.0)(),
        len,
        json.JSONEncoder().encode,
        functools.partial(brevity),
        first_of_two,
        None,
    ],
    ids=["lambda", "inner", "built-in", "method", "partial", "replaced", "none"],
)
def test_a_function_that_no_other_process_can_import_is_refused_with_advice(function: Any):
    # Mutations: name it anyway -> the run fails after a minute, in the reward's process; do not compare with what
    # the module has by that name -> another function than the one that was given scores.
    with pytest.raises(ConfigError, match=r"reward_funcs: .*define it with `def` in a \.py file"):
        Trainer(reward_funcs=[function])


def test_a_table_gives_a_function_its_weight():
    # Mutation: only strings and functions are taken -> a script cannot say TRL's reward_weights.
    [one, other] = Trainer(reward_funcs=[{"name": brevity, "weight": 0.1}, "exact_match"]).config.reward
    assert (one.name, one.weight) == (f"{Path(__file__).resolve()}:brevity", 0.1)
    assert (other.name, other.weight) == ("exact_match", 1.0)


def test_a_decorated_function_is_found_where_it_is_defined_and_not_where_its_decorator_is(tmp_path: Path):
    # Mutation: the file of its code -> that of the decorator, which has no such function.
    module = tmp_path / "tracing_of_trainer_test.py"
    module.write_text(
        "def traced(f):\n    import functools\n    return functools.wraps(f)(lambda *a: f(*a))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncrl\nfrom tracing_of_trainer_test import traced\n"
        "@traced\ndef reward(completion, row): return 1.0\n"
        "print(asyncrl.Trainer(reward_funcs=reward).config.reward[0].name)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{script.resolve()}:reward\n", done.stderr
    assert Trainer(reward_funcs=decorated).config.reward[0].name == f"{Path(__file__).resolve()}:decorated"


def test_rows_become_a_jsonl_file_that_is_named_by_its_content():
    # Mutation: name it by the time or the process -> two runs on the same rows name two files.
    rows = [{"prompt": "ab=", "answer": "ba"}, {"prompt": "\u00e9=", "answer": "\u00e9"}]
    one, two = (Trainer(train_dataset=iter(rows)).config.data.train[0].path for _ in range(2))
    other = Trainer(train_dataset=rows[:1]).config.data.train[0].path
    assert [json.loads(line) for line in Path(one).read_text().splitlines()] == rows
    assert one == two != other
    assert sorted(path.name for path in Path(one).parent.iterdir()) == sorted(
        [Path(one).name, Path(other).name]
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "b", "answer": {1}}, r"row 1 \(from 0\), column 'answer': a set is not a JSON value"),
        ({"prompt": "b", "answer": float("nan")}, r"row 1 \(from 0\), column 'answer': nan is not a finite"),
        ("b", r"row 1 \(from 0\): a str, not an object"),
    ],
    ids=["set", "nan", "text"],
)
def test_a_row_that_is_no_json_is_named_and_leaves_no_file(row: Any, says: str, tmp_path: Path):
    # Mutation: leave NaN to json -> a file that says NaN, which is no JSON.
    with pytest.raises(DataError, match="train_dataset, " + says):
        Trainer(train_dataset=[{"prompt": "a"}, row])
    assert list((tmp_path / "cache" / "rows").iterdir()) == []


def test_rows_may_hold_what_a_file_of_them_may(tmp_path: Path):
    # Mutation: json alone -> a date, which a parquet file may hold, is refused.
    path = (
        Trainer(train_dataset=[{"prompt": "a", "day": datetime.date(2026, 1, 2)}]).config.data.train[0].path
    )
    assert Path(path).read_text() == '{"prompt": "a", "day": "2026-01-02"}\n'
    assert Trainer(eval_dataset=tmp_path / "x.jsonl", eval={"every": 1}).config.data.eval[0].path == str(
        tmp_path / "x.jsonl"
    )


def test_supervised_rows_in_memory_are_the_data_of_ptx():
    # Mutation: drop the argument from the loop over data sets -> the coefficient has no data.
    algorithm = {"loss": {"ptx": {"coef": 0.1}}}
    config = Trainer(supervised_dataset=[{"text": "ab"}], algorithm=algorithm).config
    assert Path(config.data.supervised[0].path).read_text() == '{"text": "ab"}\n'
    with pytest.raises(ConfigError, match=r"supervised_dataset.* is never trained with .*ptx\.coef 0"):
        Trainer(supervised_dataset=[{"text": "ab"}])


@pytest.mark.parametrize("data", [3, {"train": [{"prompt": "a"}]}], ids=["number", "all splits"])
def test_what_is_neither_path_nor_rows_is_refused(data: Any):
    # Mutation: iterate anyway -> a TypeError without the name of the argument; the splits' names taken for rows.
    with pytest.raises(ConfigError, match=r"train_dataset: a (int|dict) is neither a path nor rows"):
        Trainer(train_dataset=data)


ROWS = [{"prompt": "ab=", "answer": "ba"}]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"train_dataset": ROWS, "eval_dataset": ROWS},
            'eval_dataset is never used with eval.every 0; set eval={"every": ...}, or leave it out '
            "(eval_dataset=None)",
        ),
        (
            {"train_dataset": [*ROWS, {"question": "x"}]},
            "train_dataset, row 1 (from 0), column 'prompt': missing; the row has question; set "
            'data={"prompt_key": ...}, or columns.prompt of the source',
        ),
        (
            {"train_dataset": ROWS, "eval_dataset": [{"prompt": "x"}], "eval": {"every": 2}},
            "eval_dataset, row 0 (from 0), column 'answer': missing, and reward 'exact_match' compares with it; the "
            'row has prompt; set data={"answer_key": ...}',
        ),
        ({"train_dataset": []}, "train_dataset: no rows"),
        (
            {"train_dataset": "no_such.jsonl"},
            "no_such.jsonl: cannot be read (No such file or directory); check train_dataset",
        ),
        ({"model": "a/b/c"}, "model: 'a/b/c' is not a folder; name one, or a model of the Hub"),
    ],
    ids=["unused", "no prompt", "no answer", "empty", "file", "model"],
)
def test_what_a_run_refuses_is_said_in_the_scripts_words(
    arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: let the error through as it is -> files of the cache, `data.eval=null`, `set eval.every`.
    monkeypatch.setattr(run_module, "run_until_done", lambda config, **_: check_config(config))
    with pytest.raises((ConfigError, DataError)) as refused:
        Trainer(**arguments).train()
    assert str(refused.value) == says


def test_what_the_configuration_refuses_is_said_in_the_scripts_words():
    # Mutation: translate only what `train` raises.
    with pytest.raises(ConfigError, match="evaluates nothing without eval_dataset; "):
        Trainer(eval={"every": 2})
    with pytest.raises(ConfigError, match=r"^reward_funcs\.0\.weight: 'x': "):
        Trainer(reward_funcs={"name": brevity, "weight": "x"})


def test_a_model_object_is_called_by_its_argument_when_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    # Mutation: the folder in the cache, which the script never named.
    def check_length(config: Config, *, resume: bool) -> None:
        model_facts.check_length(Path(config.model), 10_000)

    monkeypatch.setattr(run_module, "run_until_done", check_length)
    trainer = Trainer(build_model(), processing_class=build_tokenizer())
    with pytest.raises(ConfigError, match=r"= 10000, and model has \d+ positions"):
        trainer.train()


def test_keys_are_put_on_top_of_a_config_and_tables_are_merged():
    # Mutation: replace the table -> group_size of the file is lost.
    config = Trainer(
        config={"rollout": {"group_size": 4}, "learner": {"lr": 1.0}},
        learner={"lr": 1e-5, "prompts_per_batch": 2},
        rollout={"max_completion_tokens": 3},
        max_staleness=0,
        algorithm={"type": "grpo", "advantages": {"scale": "none"}},
    ).config
    assert (config.rollout.group_size, config.rollout.max_completion_tokens) == (4, 3)
    assert (config.learner.lr, config.learner.prompts_per_batch, config.max_staleness) == (1e-5, 2, 0)
    assert isinstance(config.algorithm.advantages, OutcomeAdvantages)
    assert config.algorithm.advantages.scale == "none"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_an_argument_by_name_or_with_its_options(recipe: str):
    # Mutation: merge what the defaults have into the recipe's table.
    assert Trainer(algorithm=recipe).config == load_config(None, [f"algorithm={recipe}"])
    options = {"type": recipe, "preset": "verl", "target_kl": 0.1, "loss": {"kl": {"coef": 0.01}}}
    algorithm = Trainer(config={"seed": 1}, algorithm=options).config.algorithm
    assert (algorithm.type, algorithm.preset, algorithm.target_kl) == (recipe, "verl", 0.1)
    assert algorithm.loss.kl is not None
    assert algorithm.loss.kl.coef == 0.01
    assert algorithm.stages == RECIPES[recipe].stages


def own_loss(tokens: Any) -> Any:
    return -tokens.advantages * tokens.learner_logprobs


def own_advantages(experience: Any) -> Any:
    return experience.columns.rollout_logprobs * 0


def test_functions_of_the_script_become_names_that_the_learner_imports():
    # Mutation: hand the objects over -> the configuration holds a function, not plain data.
    options = {"loss": {"policy": own_loss}, "advantages": {"type": "custom", "function": own_advantages}}
    algorithm = Trainer(algorithm=options).config.algorithm
    file = Path(__file__).resolve()
    assert isinstance(algorithm.loss.policy, CustomLoss)
    assert isinstance(algorithm.advantages, CustomAdvantages)
    assert algorithm.loss.policy.function == f"{file}:own_loss"
    assert algorithm.advantages.function == f"{file}:own_advantages"
    with pytest.raises(
        ConfigError, match=r"is a Recipe, which other .*name it: algorithm='path/to/file.py:NAME'"
    ):
        Trainer(algorithm=Recipe())
    with pytest.raises(ConfigError, match=r"algorithm: .*<lambda>.* is not a function at the top of a file"):
        Trainer(algorithm={"loss": {"policy": lambda tokens: tokens}})


def test_a_config_that_is_given_is_not_written_to():
    # Mutation: put the keys into the caller's tables.
    tree = {"rollout": {"group_size": 4}, "learner": {"lr": 1.0}}
    Trainer(config=tree, rollout={"group_size": 2}, train_dataset="sort4")
    assert tree == {"rollout": {"group_size": 4}, "learner": {"lr": 1.0}}
    loaded = load_config(None, ["seed=3"])
    assert Trainer(config=loaded, max_staleness=1).config == load_config(None, ["seed=3", "max_staleness=1"])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"learner": {"leraning_rate": 1.0}}, r"learner\.leraning_rate: unknown key"),
        ({"num_generations": 8}, r"num_generations: unknown key; here it is rollout\.group_size"),
        ({"run": None}, r"run: None: "),
        ({"config": {"run": 3}, "run": {"dir": "x"}, "learner": 3}, r"learner: 3: "),
        ({"learner": {"lr": 1j}}, r"holds 1j, a complex; give plain data"),
        ({"learner": {("lr",): 1}}, r"is not plain data: keys must be str"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_wrong_key_is_refused_as_in_a_file(keys: dict[str, Any], says: str):
    # Mutation: look into `run` before it is known to be a table -> AttributeError.
    with pytest.raises(ConfigError, match=says):
        Trainer(**keys)


def test_a_folder_may_be_a_path_object(tmp_path: Path):
    assert Trainer(run={"dir": tmp_path}).config.run.dir == str(tmp_path)


def test_a_model_object_needs_its_tokenizer_and_a_named_model_brings_its_own():
    # Mutation: ignore a tokenizer beside a name -> the run uses another chat template than the script set.
    with pytest.raises(ConfigError, match=r"model: a int is neither"):
        Trainer(3)
    with pytest.raises(ConfigError, match=r"model: a Qwen2ForCausalLM is neither .*processing_class="):
        Trainer(build_model())
    for model in ("tiny", None):
        with pytest.raises(ConfigError, match=r"processing_class: a \w+, but a model that is only named"):
            Trainer(model, processing_class=build_tokenizer())


def folder_of(model: Any, tokenizer: Any) -> Path:
    """Where the run will find the model, by the run's own rules."""
    return resolve_model(Trainer(model, processing_class=tokenizer).config.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_object_is_trained_as_it_is_in_memory(dtype: torch.dtype):
    # Mutations: the folder that the model was loaded from; one saved before the weights were changed; float32.
    model, tokenizer = build_model().to(dtype), build_tokenizer()
    before = folder_of(model, tokenizer)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    folder = folder_of(model, tokenizer)
    assert folder != before
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert set(found) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name


def test_a_model_object_is_kept_once_and_anew_when_its_tokenizer_or_config_changes(tmp_path: Path):
    # Mutation: named by the weights alone -> the folder with the old chat template is trained.
    model, tokenizer = build_model(), build_tokenizer()
    first = folder_of(model, tokenizer)
    assert folder_of(model, tokenizer) == first
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    second = folder_of(model, tokenizer)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    third = folder_of(model, tokenizer)
    assert len({first, second, third}) == 3
    assert AutoTokenizer.from_pretrained(second).chat_template.endswith("!")
    assert (
        AutoTokenizer.from_pretrained(first).chat_template
        != AutoTokenizer.from_pretrained(second).chat_template
    )
    assert AutoModelForCausalLM.from_pretrained(third).config.rope_parameters["rope_theta"] == 123.0
    kept = sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())
    assert kept == sorted(path.name for path in (first, second, third))


class Adapter:
    """Saves like a PEFT model: its own weights alone."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"")


class SlowTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "vocab.txt").write_text("")


def test_objects_that_do_not_save_what_a_run_needs_are_refused_and_leave_nothing(tmp_path: Path):
    # Mutation: keep whatever was saved -> the run fails with a folder that holds no model.
    with pytest.raises(ConfigError, match=r"model: a Adapter saves no config.json .*merge_and_unload"):
        Trainer(Adapter(), processing_class=build_tokenizer())
    with pytest.raises(ConfigError, match=r"processing_class: a SlowTokenizer saves no tokenizer.json"):
        Trainer(build_model(), processing_class=SlowTokenizer())
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def finished_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs end at once, in folders of their own; filled with the configurations they were given."""
    given: list[Any] = []

    def run(config: Any, *, resume: bool) -> Path:
        given.append(config)
        path = folder / f"run{len(given)}"
        path.mkdir()
        (path / "metrics.jsonl").write_text('{"critic/score/mean": 0.5}\n{"critic/score/mean": 0.75}\n')
        return path

    monkeypatch.setattr(run_module, "run_until_done", run)
    return given


def test_train_gives_every_versions_metrics_and_each_call_is_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: name the run when the Trainer is made -> the second call is refused: the directory exists.
    given = finished_runs(tmp_path, monkeypatch)
    trainer = Trainer(max_staleness=1)
    first, second = trainer.train(), trainer.train()
    assert first.metrics == [{"critic/score/mean": 0.5}, {"critic/score/mean": 0.75}]
    assert (first.run_directory, second.model_path) == (tmp_path / "run1", tmp_path / "run2" / "model")
    assert given == [trainer.config] * 2
    assert trainer.config.run.name is None


def test_a_run_is_not_started_from_a_thread_or_an_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutations: no check -> in a notebook "asyncio.run() cannot be called from a running event loop"; in a thread
    # the same of signals.
    given = finished_runs(tmp_path, monkeypatch)
    trainer, refused = Trainer(), []

    def train() -> None:
        try:
            trainer.train()
        except ConfigError as error:
            refused.append(str(error))

    async def train_in_a_loop() -> None:
        train()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    asyncio.run(train_in_a_loop())
    assert ["main thread" in refused[0], "running event loop" in refused[1]] == [True, True]
    assert given == []


def test_a_script_that_starts_a_run_while_its_reward_is_imported_says_what_to_do(tmp_path: Path):
    # Mutation: no check -> the import starts a run, which imports the script, and so on.
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncrl\n"
        "def reward(completion, row):\n    return 1.0\n"
        f"asyncrl.Trainer(reward_funcs=reward, run={{'dir': {str(tmp_path)!r}}}).train()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert '`if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("run-*"))
