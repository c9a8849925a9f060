"""The model card: its figures are those of the run's files, its front matter one that the Hub reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from asyncrl.config import dump_config, load_config
from asyncrl.errors import DataError
from asyncrl.model_card import figures_of, shown_name, write_model_card

REWARDS = [0.1, 0.3, 0.9, 0.2, 0.4, 0.5, 0.6]
TOKENS = [100.0, 300.0, 200.0, 50.0, 50.0, 200.0, 100.0]
STALENESS = [0.0, 1.0, 1.5, 0.5, 1.0, 0.25, 0.75]
OLDEST = [0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
STEP_S = [10.0, 1.5, 1.5, 2.0, 1.0, 1.0, 3.0]


def write_run(folder: Path, *overrides: str) -> Path:
    """A run directory of seven versions and two evaluations, without a model."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        dump_config(load_config(None, ["run.name=first-try", "learner.max_versions=7", *overrides]))
    )
    lines = [
        {
            "training/policy_version": float(version),
            "critic/score/mean": reward,
            "batch/trained_tokens": tokens,
            "staleness/mean": staleness,
            "staleness/max": oldest,
            "timing_s/step": step_s,
        }
        for version, (reward, tokens, staleness, oldest, step_s) in enumerate(
            zip(REWARDS, TOKENS, STALENESS, OLDEST, STEP_S, strict=True), start=1
        )
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluations = [
        (0, {"val-core/gsm8k/reward/mean@1": 0.125, "val-aux/x": 1.0}),
        (7, {"val-core/gsm8k/reward/mean@1": 0.5}),
    ]
    (folder / "evaluations.jsonl").write_text(
        "".join(json.dumps({"version": v, "metrics": metrics}) + "\n" for v, metrics in evaluations)
    )
    return folder


def card_of(run: Path) -> tuple[ModelCard, dict[str, str]]:
    """The card, and its tables as name -> value."""
    write_model_card(run, run)
    card = ModelCard.load(run / "README.md")
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return card, {row[0]: row[1] for row in rows}


def test_the_figures_are_those_of_the_metrics(tmp_path: Path):
    # Mutations: the last line for the best; a plain mean of staleness/mean over versions (0.714); the last 5 as
    # the first 5; tokens of the last version alone; steps without the first.
    _, shown = card_of(write_run(tmp_path / "run"))
    weighted = sum(s * n for s, n in zip(STALENESS, TOKENS, strict=True)) / sum(TOKENS)
    assert shown["reward, first version"] == "0.1"
    assert shown["reward, last version"] == "0.6"
    assert shown["reward, best version"] == "0.9 (version 3)"
    assert shown["reward, mean of the last 5"] == f"{(0.9 + 0.2 + 0.4 + 0.5 + 0.6) / 5:.4g}"
    assert shown["staleness of trained tokens, mean"] == f"{weighted:.3g} versions"
    assert shown["staleness of trained tokens, max"] == "2 versions"
    assert shown["trained tokens"] == "1000"
    assert shown["training time"] == "20 s"
    assert shown["val-core/gsm8k/reward/mean@1, first and last"] == "0.125, 0.5"
    assert "val-aux/x, first and last" not in shown


def test_the_front_matter_names_a_base_model_of_the_hub_and_no_license(tmp_path: Path):
    # Mutations: a base_model that is no name on the Hub, which refuses the card; a license that nobody gave.
    card, shown = card_of(write_run(tmp_path / "run", "model=HuggingFaceTB/SmolLM2-135M-Instruct"))
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert card.data.library_name == "transformers"
    assert card.data.license is None
    assert set(card.data.tags or []) == {"asyncrl", "reinforcement-learning", "grpo"}
    assert "7 policy versions of grpo" in card.text
    assert shown["reward"] == "exact_match (weight 1)"
    assert shown["data"] == "rev4"
    assert shown["algorithm"] == "grpo"
    assert "lr 0.0003" in shown["optimizer"]
    assert "adapters" not in shown


def test_a_card_of_adapters_says_so(tmp_path: Path):
    # Mutation: leave the row out -> the card reads as if every weight had been trained.
    _, shown = card_of(
        write_run(tmp_path / "run", "learner.lora={rank: 4, target_modules: [q_proj, v_proj]}")
    )
    assert shown["adapters"] == "LoRA of rank 4, alpha 32 on q_proj, v_proj, merged"


def test_a_model_that_is_no_name_on_the_hub_stays_out_of_the_front_matter(tmp_path: Path):
    # Mutations: print a path whole -> folders of the trainer's machine are published; of rewards that are models too.
    card, shown = card_of(
        write_run(
            tmp_path / "run",
            "model=/home/me/models/mine",
            "data.train=/home/me/rows.jsonl",
            "reward=[/home/me/rewards.py:brevity, model:/home/me/judge]",
        )
    )
    assert card.data.base_model is None
    assert shown["base model"] == "mine"
    assert shown["data"] == "rows.jsonl"
    assert shown["reward"] == "rewards.py:brevity (weight 1), model:judge (weight 1)"
    assert "/home/me" not in card.content


def test_a_folder_that_has_the_form_of_a_name_on_the_hub_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: look at the form alone -> the card says that it is made from somebody else's model.
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    card, shown = card_of(write_run(tmp_path / "run", "model=models/mine"))
    assert card.data.base_model is None
    assert shown["base model"] == "models/mine"


def test_the_card_says_what_the_run_changed_of_its_recipe_and_publishes_no_path(tmp_path: Path):
    # Mutations: every option of the recipe, of which there are a hundred; a path of the trainer's machine.
    _, shown = card_of(
        write_run(
            tmp_path / "run",
            "algorithm=ppo",
            "algorithm.critic.lr=0.5",
            "algorithm.loss.kl={coef: 0.25}",
            "algorithm.reference.model=/home/me/base",
            "algorithm.loss.policy=/home/me/mine.py:loss",
        )
    )
    said = shown["algorithm"]
    assert said.startswith("ppo, reference.model base, ")
    for part in ("critic.lr 0.5", "loss.kl.coef 0.25", "loss.policy.function mine.py:loss"):
        assert part in said
    assert "gamma" not in said
    assert "/home/me" not in said


@pytest.mark.parametrize(
    ("path", "shown"),
    [("openai/gsm8k", "openai/gsm8k"), ("~/x/y.jsonl", "y.jsonl"), ("./mine", "mine"), ("a.b:c", "a.b:c")],
)
def test_only_paths_are_shortened(path: str, shown: str):
    assert shown_name(path) == shown


def test_a_line_that_is_being_written_is_left_out_and_a_broken_one_is_an_error(tmp_path: Path):
    # Mutation: parse every line -> the first half fails; skip what does not parse -> the second does not.
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"critic/score')
    _, shown = card_of(run)
    assert shown["reward, last version"] == "0.6"
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read"):
        write_model_card(run, run)


def test_a_run_without_a_version_has_no_figures():
    with pytest.raises(DataError, match="no trained version"):
        figures_of([])
