"""The model `tiny`: a Qwen2 of 0.4M parameters with a character tokenizer, made in seconds, offline.

Random weights would never be rewarded. So it is warmed up by supervised training on demonstrations of the
tasks rev4 and sort4 of which 30% are right and 70% wrong in one fixed way (a copy; a shuffle). It settles
at about 20% right at temperature 1, without delicate early stopping, and reinforcement learning can then
remove the wrong mode.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from asyncrl.envs.tasks import rev4, sort4

CHARACTERS = string.digits + "+-*/=()., ?!:'\n" + string.ascii_letters
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

SHARE_RIGHT = 0.3
"""Share of right demonstrations."""
NUM_STEPS = 400
BATCH_SIZE = 64
LEARNING_RATE = 1e-3


def save_tiny(folder: Path, seed: int = 0, num_steps: int = NUM_STEPS) -> None:
    """Makes, warms up and saves the model and its tokenizer. The same seed makes the same weights."""
    tokenizer = build_tokenizer()
    with _deterministic(seed):
        model = build_model()
        warm_up(model, tokenizer, demonstrations(seed), num_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; its chat template joins the messages' contents."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def build_model() -> Qwen2ForCausalLM:
    """The architecture, with random weights from torch's global generator."""
    config = Qwen2Config(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen2ForCausalLM(config)


def demonstrations(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs, rev4 and sort4 in turn, SHARE_RIGHT of them right."""
    rng = random.Random(f"demonstrations {seed}")
    shuffle = lambda text: "".join(rng.sample(text, len(text)))  # noqa: E731
    tasks: list[tuple[Iterator[dict[str, Any]], Callable[[str], str]]] = [
        (rev4(seed), lambda letters: letters),
        (sort4(seed), shuffle),
    ]
    while True:
        for rows, wrong_answer in tasks:
            row = next(rows)
            is_right = rng.random() < SHARE_RIGHT
            yield row["prompt"], row["answer"] if is_right else wrong_answer(row["prompt"].rstrip("="))


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Iterator[tuple[str, str]],
    num_steps: int,
) -> None:
    """AdamW on the mean cross-entropy of answer and EOS tokens; all pairs are equally long."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(num_steps):
        batch = list(islice(pairs, BATCH_SIZE))
        num_prompt_tokens = len(batch[0][0])
        ids = torch.tensor([[*tokenizer.encode(p + a), EOS_ID] for p, a in batch])  # [B, T]
        logits = model(ids[:, :-1], use_cache=False).logits[:, num_prompt_tokens - 1 :]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, num_prompt_tokens:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Seeds torch, and uses one thread: the order of sums, and so the weights, depend on their number."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(num_threads)
