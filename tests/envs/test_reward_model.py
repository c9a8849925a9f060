"""A sequence classifier as a reward: a tiny one with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_cases import in_pool, request
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from asyncrl.envs.reward_messages import RewardSpec, RewardTraits
from asyncrl.envs.reward_model import model_reward
from asyncrl.envs.reward_pool import RewardPool
from asyncrl.errors import ConfigError
from asyncrl.models.tiny import build_tokenizer

CHAT = [{"role": "user", "content": "ab"}]
MAX_TOKENS = 20
TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"


def save_classifier(folder: Path, num_labels: int, template: str | None = TEMPLATE) -> Any:
    """Its model, and the folder in Hugging Face's layout."""
    torch.manual_seed(num_labels)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.model_max_length = MAX_TOKENS
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def logits(model: Any, text: str) -> torch.Tensor:
    """[labels] of one text, alone and without padding."""
    ids = build_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return model(ids).logits[0]


def test_one_label_scores_the_rendered_chat_in_its_own_process(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, num_labels=1)

    async def check(pool: RewardPool) -> None:
        assert pool.takes_group
        outcomes = await pool.score(request("c", "dedede", row={}, prompt=CHAT))
        # Catches: the completion alone, padding scored as the last token, answers in another order.
        expected = [logits(model, "ab;c;").item(), logits(model, "ab;dedede;").item()]
        assert [outcome.reward for outcome in outcomes] == pytest.approx(expected, abs=1e-5)
        assert abs(expected[0] - expected[1]) > 1e-3
        (plain,) = await pool.score(request("c", prompt="ab"))
        assert plain.reward == pytest.approx(logits(model, "abc").item(), abs=1e-5)

    in_pool(RewardSpec(f"model:{tmp_path}", timeout_s=60.0), check, num_workers=2)


def test_what_is_too_long_for_the_classifier_has_no_score_and_the_others_have_theirs(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, num_labels=1)
    reward = model_reward(str(tmp_path), {})
    reward.load()
    values = reward.call(request("a" * 17, "b", "a" * 16, prompt="abcd"))
    # Mutations: no limit -> positions that were never trained; cut -> the score of another text; the scores of
    # the rest given to the wrong ones.
    assert str(values[0]) == "prompt and completion have 21 tokens, and the model takes 20"
    expected = [logits(model, "abcdb").item(), logits(model, "abcd" + "a" * 16).item()]
    assert values[1:] == pytest.approx(expected, abs=1e-5)
    (alone,) = reward.call(request("a" * 17, prompt="abcd"))
    assert isinstance(alone, ValueError)


def test_pickled_weights_are_refused_and_never_run(tmp_path: Path) -> None:
    # Mutation: use_safetensors left out -> transformers unpickles the .bin file.
    class Canary:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "canary",)

    save_classifier(tmp_path, num_labels=1)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"score.weight": Canary()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"reward model:.*safetensors"):
        model_reward(str(tmp_path), {}).load()
    assert not (tmp_path / "canary").exists()


def test_a_classifier_whose_head_is_not_in_its_files_is_refused(tmp_path: Path) -> None:
    # Mutation: loaded all the same -> transformers makes a random head, and rewards are noise.
    save_classifier(tmp_path, num_labels=1)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "score.weight"}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"its files lack 1 of its weights, such as score\.weight"):
        model_reward(str(tmp_path), {}).load()


@pytest.mark.parametrize("probability", [False, True])
def test_a_label_is_chosen_by_its_number(tmp_path: Path, probability: bool) -> None:
    model = save_classifier(tmp_path, num_labels=3)
    reward = model_reward(str(tmp_path), {"label": 1, "probability": probability})
    reward.load()
    (value,) = reward.call(request("c", prompt=CHAT))
    expected = logits(model, "ab;c;")
    expected = expected.softmax(0) if probability else expected
    # Catches: label 0; a sigmoid of one logit among several.
    assert value == pytest.approx(expected[1].item(), abs=1e-5)


def test_one_label_has_a_probability_too(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, num_labels=1)
    reward = model_reward(str(tmp_path), {"probability": True})
    reward.load()
    assert reward.call(request("c", prompt=CHAT))[0] == pytest.approx(
        logits(model, "ab;c;").sigmoid().item(), abs=1e-5
    )


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "a LlamaForCausalLM, not a sequence classifier"),
        ({}, {}, "it has 2 labels; say which one is the reward"),
        ({"num_labels": 4}, {}, "it has 4 labels"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, {}, "it has 3 labels"),
        ({}, {"label": 2}, "kwargs.label 2, and its labels are 0 to 1"),
        ({}, {"lable": 1}, "kwargs {'lable': 1}: got an unexpected keyword argument 'lable'"),
    ],
)
def test_a_folder_that_cannot_be_the_reward_is_refused_before_it_is_loaded(
    tmp_path: Path, config: dict[str, Any], kwargs: dict[str, Any], message: str
) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"], **config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        model_reward(str(tmp_path), kwargs)


def test_a_config_may_give_the_number_of_labels_alone(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_reward(str(tmp_path), {}).traits.is_large


def test_a_folder_without_a_chat_template_takes_texts_only(tmp_path: Path) -> None:
    save_classifier(tmp_path / "with", 1)
    save_classifier(tmp_path / "without", 1, template=None)
    assert [model_reward(str(tmp_path / name), {}).traits.takes_chat for name in ("with", "without")] == [
        True,
        False,
    ]


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward model:\./no/such: not a folder"):
        model_reward("./no/such", {})


def test_a_model_of_the_hub_is_checked_as_a_folder_once_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_classifier(tmp_path / "snapshot", 2, template=None)
    here: list[Path] = []

    def hub_folder(name: str, *, local_files_only: bool) -> Path | None:
        # Mutation: fetch it in the worker -> a wrong name shows when the engine starts, on every server.
        assert (name, local_files_only) == ("owner/judge", True)
        return here[0] if here else None

    monkeypatch.setattr("asyncrl.envs.reward_model.hub_folder", hub_folder)
    unknown = model_reward("owner/judge", {})
    assert unknown.traits == RewardTraits(takes_group=True, is_large=True)
    with pytest.raises(ConfigError, match="reward model:owner/judge: not in the Hub's cache"):
        unknown.load()
    here.append(tmp_path / "snapshot")
    with pytest.raises(ConfigError, match="reward model:owner/judge: it has 2 labels"):
        model_reward("owner/judge", {})
    found = model_reward("owner/judge", {"label": 1})
    assert not found.traits.takes_chat
    found.load()
    assert len(found.call(request("a", prompt="b"))) == 1


def test_a_device_that_is_not_there_is_refused_when_the_worker_loads_it(tmp_path: Path) -> None:
    save_classifier(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"reward model:.*nowhere"):
        model_reward(str(tmp_path), {"device": "nowhere"}).load()
