"""`model:FOLDER`: a sequence classifier of transformers as a reward, in a worker process of its own.

kwargs: `device` ("cpu", "cuda": the rollout server's first GPU), `label` (which of several labels is the reward),
`probability` (that label's softmax, or with one label its sigmoid, instead of its logit).

Only `load`, in the worker, imports torch; what can be wrong with the folder is found out before, from its files. A
model of the Hub is fetched before anything starts (launch/prepare.py), and the worker loads what is there then.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.envs.reward_messages import RewardRequest, RewardTraits
from asyncrl.envs.reward_styles import Reward
from asyncrl.errors import ConfigError
from asyncrl.hub import hub_folder, is_hub_name

MODEL_PREFIX = "model:"
_SUFFIX = "ForSequenceClassification"


def model_reward(name: str, kwargs: dict[str, Any]) -> Reward:
    """The classifier of a folder, or of the Hub. Raises ConfigError; loads and fetches nothing.

    Of a model that is not here yet (`find_model`) nothing is known, and `load` refuses it.
    """
    try:
        inspect.signature(ModelOptions).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"reward {MODEL_PREFIX}{name}: kwargs {kwargs}: {error}") from error
    options = ModelOptions(**kwargs)
    folder = find_model(name)
    if folder is not None:
        _check_folder(name, folder, options)
    classifier = Classifier(name, folder, options)
    takes_chat = folder is None or _has_chat_template(folder)
    traits = RewardTraits(takes_group=True, takes_chat=takes_chat, is_large=True)
    return Reward(classifier.score, traits, classifier.load)


def find_model(name: str) -> Path | None:
    """The folder of that name, or of the Hub's model in its cache; None while that is not here.

    Raises ConfigError for what is neither a folder nor a name of the Hub.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(name):
        raise ConfigError(f"reward {MODEL_PREFIX}{name}: not a folder; name one, or a model of the Hub")
    return hub_folder(name, local_files_only=True)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The reward's kwargs."""

    device: str = "cpu"
    label: int | None = None
    probability: bool = False


class Classifier:
    """One model, loaded by `load`; `score` gives a value a completion."""

    def __init__(self, name: str, folder: Path | None, options: ModelOptions) -> None:
        self._name = name
        self._folder = folder
        self._options = options
        self._tokenizer: Any = None
        self._score_ids: Callable[[list[list[int]]], list[float]]
        self._max_tokens = math.inf

    def load(self) -> None:
        """Raises ConfigError when the model is not here, not whole, or has several labels and none is chosen."""
        if self._folder is None:
            raise ConfigError(f"reward {MODEL_PREFIX}{self._name}: not in the Hub's cache of this machine")
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                self._folder, use_safetensors=True, output_loading_info=True
            )
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
            model = model.to(self._options.device).eval()
        except Exception as error:
            raise ConfigError(f"reward {MODEL_PREFIX}{self._name}: {error}") from error
        _check_label(self._name, model.config.num_labels, self._options)
        if missing := sorted(loaded["missing_keys"]):  # transformers would make them up
            raise ConfigError(
                f"reward {MODEL_PREFIX}{self._name}: its files lack {len(missing)} of its weights, such as {missing[0]}"
            )
        tokenizer, label = self._tokenizer, self._options.label or 0
        tokenizer.padding_side = "right"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise ConfigError(
                f"reward {MODEL_PREFIX}{self._name}: its tokenizer has no pad token and no EOS token"
            )
        model.config.pad_token_id = tokenizer.pad_token_id  # decoders score the last token that is no padding
        self._max_tokens = min(
            tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", math.inf)
        )

        @torch.inference_mode()
        def score_ids(ids: list[list[int]]) -> list[float]:
            inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
            logits = model(**inputs.to(model.device)).logits.float()  # [len(ids), labels]
            if self._options.probability:
                logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
            return logits[:, label].tolist()

        self._score_ids = score_ids

    def score(self, request: RewardRequest) -> list[float | ValueError]:
        """The group in one forward: prompt and completion in the classifier's own chat template and tokens.

        An error in place of what is too long for the classifier: half of a text is another text.
        """
        ids = self._tokenize(request)
        fitting = [own for own in ids if len(own) <= self._max_tokens]
        scores = iter(self._score_ids(fitting) if fitting else ())
        return [
            next(scores)
            if len(own) <= self._max_tokens
            else ValueError(
                f"prompt and completion have {len(own)} tokens, and the model takes {self._max_tokens}"
            )
            for own in ids
        ]

    def _tokenize(self, request: RewardRequest) -> list[list[int]]:
        is_chat = isinstance(request.prompt, list)
        texts = [
            self._render(request.prompt, text) if is_chat else request.prompt + text
            for text in request.completions
        ]
        # A chat template writes the special tokens.
        return self._tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]

    def _render(self, prompt: list[Any], completion: str) -> str:
        messages = [*prompt, {"role": "assistant", "content": completion}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False)


def _check_folder(name: str, folder: Path, options: ModelOptions) -> None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward {MODEL_PREFIX}{name}: config.json: {error}") from error
    architectures = config.get("architectures") or []
    if not any(architecture.endswith(_SUFFIX) for architecture in architectures):
        raise ConfigError(
            f"reward {MODEL_PREFIX}{name}: a {', '.join(architectures) or 'model of unknown architecture'}, "
            f"not a sequence classifier (...{_SUFFIX})"
        )
    labels = config.get("id2label")
    _check_label(name, config.get("num_labels", 2) if labels is None else len(labels), options)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError):
        return False


def _check_label(name: str, num_labels: int, options: ModelOptions) -> None:
    if options.label is None and num_labels != 1:
        raise ConfigError(
            f"reward {MODEL_PREFIX}{name}: it has {num_labels} labels; say which one is the reward, such as "
            "kwargs: {label: 1}"
        )
    if options.label is not None and not 0 <= options.label < num_labels:
        raise ConfigError(
            f"reward {MODEL_PREFIX}{name}: kwargs.label {options.label}, and its labels are 0 to {num_labels - 1}"
        )
