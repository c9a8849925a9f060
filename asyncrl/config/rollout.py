"""`data`, `eval`, `rollout`: which prompts, and how they are sampled."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from asyncrl.config.table import Positive, Table, tables_by_name


class SourceConfig(Table):
    """One source of rows, where a name alone does not say enough."""

    path: str
    """A JSONL or parquet file (a pattern such as `part-*.parquet` is several), a folder saved by `datasets`, a
    data set of the Hub, `module:attr` of a generator `f(seed) -> rows`, or a task: rev4, sort4, first_word."""
    subset: str | None = None
    """Configuration of a data set of the Hub, such as `main` of openai/gsm8k."""
    split: str = "train"
    """Split of a data set of the Hub or of a saved folder."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts that come from here, relative to the other sources. Where all weights are equal, all
    sources are shuffled together, each with the share of its size."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column here -> column of the source: {prompt: question}. Dots reach into objects: reward_model.ground_truth."""
    filter: str | None = None
    """`module:attr` of `f(row) -> bool`: rows for which it is false are left out, counted and shown."""


class DataConfig(Table):
    """Where prompts, and supervised tokens, come from."""

    train: Annotated[tuple[SourceConfig, ...], Field(min_length=1)] = (SourceConfig(path="rev4"),)
    """Path of one source, or a list of sources (paths, or tables {path: ..., weight: ..., columns: ...})."""
    eval: tuple[SourceConfig, ...] = ()
    """The data set of evaluations, named like `train`; null is none."""
    supervised: tuple[SourceConfig, ...] = ()
    """The data set of `algorithm.loss.ptx`, named like `train`; null is none. A row has the columns `prompt` and
    `completion`, or `messages`, or `text`."""
    max_supervised_tokens: Positive | None = None
    """Longer rows of `supervised`, prompt and completion together, are dropped, counted and shown; null is
    max_prompt_tokens and the rollout's max_completion_tokens together. Tokens."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of chat messages, or a string."""
    answer_key: str = "answer"
    """Column that the built-in rewards compare with; dots reach into objects. Where a row lacks it and has verl's
    `reward_model.ground_truth`, that is used."""
    source_key: str = "data_source"
    """Column that names where a row is from: rewards are chosen and evaluations reported by it."""
    as_chat: bool = False
    """Make a string prompt one user message and apply the chat template (a list always gets it)."""
    system_prompt: str | None = None
    """System message put before chat prompts that have none."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are dropped, counted and shown. Tokens."""
    max_rows: Positive = 10_000
    """At most this many rows are taken from a generator."""

    @field_validator("train", "eval", "supervised", mode="before")
    @classmethod
    def _by_path(cls, value: Any) -> Any:
        return tables_by_name(value, "path")

    @field_validator("eval")
    @classmethod
    def _every_row_once(cls, value: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        if weighted := [source for source in value if source.weight != 1.0]:
            raise ValueError(
                f"weight {weighted[0].weight:g} of {weighted[0].path} has no effect: an evaluation takes every row "
                "once; leave it out"
            )
        return value


class EvalConfig(Table):
    """Evaluation while training."""

    every: Annotated[int, Field(ge=0)] = 0
    """Versions between evaluations, the first before training, one always at the end; 0 is never."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of evaluations: nothing is trained on them, so it may truncate."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The most likely tokens that evaluations sample from; 0 is all."""
    num_samples: Positive = 1
    """Completions of each evaluation prompt: mean@N, best@N, maj@N, pass@k are over them."""
    max_completion_tokens: Positive | None = None
    """Longest completion of an evaluation; null is the rollout's. Tokens."""
    max_prompts: Positive | None = None
    """Only the first so many rows of data.eval; null is all."""

    @field_validator("temperature")
    @classmethod
    def _greedy_or_sampled(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise ValueError(f"{value!r} is below the engine's lowest, 0.01; use that, or 0 for greedy")
        return value


class RolloutConfig(Table):
    """The rollout servers."""

    engine: Literal["vllm"] = "vllm"
    """Inference engine behind the Engine seam."""
    num_servers: Annotated[int, Field(ge=0)] = 1
    """Servers that `asyncrl train` starts on this node. More may connect, and leave, at any time."""
    tensor_parallel_size: Positive = 1
    """Devices one engine spans."""
    group_size: Positive = 8
    """Trajectories a prompt."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature. The learner divides its logits by it too. vLLM would raise smaller ones to 0.01."""
    top_p: float = 1.0
    """Only 1.0: a truncated distribution cannot be scored by the learner."""
    top_k: int = 0
    """Only 0 (off), for the same reason."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the model's EOS tokens."""
    max_completion_tokens: Positive = 8
    """Longest completion. Tokens."""
    max_groups_in_flight: Positive | Literal["auto"] = "auto"
    """Groups that one server generates at once; `auto` is what its KV cache and max_num_seqs hold."""
    max_num_seqs: Positive = 128
    """Sequences that the engine runs at once. No request waits inside vLLM beyond it."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Memory of the KV cache on a CPU. GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of each device's memory the engine may use on a GPU."""
    block_size: Positive | None = None
    """Tokens a KV block (a multiple of 32 on a CPU); null is vLLM's own choice (128 on a CPU)."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the engine as they are, after the keys above."""

    @field_validator("engine_args")
    @classmethod
    def _finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise ValueError("holds a number that is not finite; every number must be") from error
        return value

    @field_validator("top_p")
    @classmethod
    def _whole_distribution_p(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                f"top_p {value} truncates the distribution, so the learner's log-probs would be of another "
                "one; train with 1.0"
            )
        return value

    @field_validator("top_k")
    @classmethod
    def _whole_distribution_k(cls, value: int) -> int:
        if value != 0:
            raise ValueError(
                f"top_k {value} truncates the distribution, so the learner's log-probs would be of another "
                "one; train with 0"
            )
        return value
