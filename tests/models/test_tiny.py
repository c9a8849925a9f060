"""The tiny model: its tokenizer, its demonstrations, its warm-up."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from asyncrl.envs.dataset import load_tokenizer
from asyncrl.envs.tasks import TASKS
from asyncrl.models.tiny import EOS_ID, build_tokenizer, demonstrations, save_tiny


def test_one_character_is_one_token_and_text_survives() -> None:
    tokenizer = build_tokenizer()
    text = "First word of: box\n3142=1234"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text


def test_three_in_ten_demonstrations_are_right_and_the_others_wrong_in_one_way() -> None:
    # Catches: SHARE_RIGHT 0.3 -> 0.7; a wrong answer that is random letters.
    counts: Counter[str] = Counter()
    for prompt, answer in islice(demonstrations(0), 4000):
        shown = prompt.rstrip("=")
        if shown.isalpha():
            counts["rev4 right" if answer == shown[::-1] else "rev4 copy"] += 1
            assert answer in (shown, shown[::-1])
        else:
            counts["sort4 right" if answer == "".join(sorted(shown)) else "sort4 wrong"] += 1
            assert sorted(answer) == sorted(shown)
    assert counts["rev4 right"] + counts["rev4 copy"] == 2000
    assert counts["rev4 right"] / 2000 == pytest.approx(0.3, abs=0.04)
    # A shuffle of four digits is right by luck about once in twenty times.
    assert counts["sort4 right"] / 2000 == pytest.approx(0.34, abs=0.05)


def test_the_seed_decides_the_weights_and_the_embedding_is_stored_once(tmp_path: Path) -> None:
    # Catches: torch's global generator left unseeded; lm_head saved beside the tied embedding.
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        save_tiny(tmp_path / name, seed=seed, num_steps=2)
    one, two, three = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "three"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["model.norm.weight"], three["model.norm.weight"])
    assert "lm_head.weight" not in one
    assert sum(tensor.numel() for tensor in one.values()) == 404_736
    assert torch.equal(torch.get_rng_state(), state)
    assert load_tokenizer(tmp_path / "one").encode("ab") == build_tokenizer().encode("ab")


@pytest.mark.slow
def test_after_the_warm_up_about_one_in_five_is_right_at_temperature_1(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    tokenizer = build_tokenizer()
    for task in ("rev4", "sort4"):
        rows = list(islice(TASKS[task](999), 1000))
        ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sampled = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=8
            )
        texts = [tokenizer.decode(row[5:], skip_special_tokens=True) for row in sampled]
        right = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)
        assert 0.1 < right < 0.35, task
