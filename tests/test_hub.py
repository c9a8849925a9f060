"""Names of the Hub, what it says of them, and which of its snapshots are complete. Without the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_server import hub_server

from asyncrl.hub import ask_hub, hub_folder, is_hub_name

WHOLE = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}
INDEX = json.dumps(
    {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
)
SHARDED = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": "",
    "model-2.safetensors": "",
}


def test_what_is_a_name_of_the_hub() -> None:
    names = ["gpt2", "owner/model-1.5B_x", "./a/b", "/a", "~/a", "a/b/c", "a/", "", "-a/b"]
    # The Hub's client raises for these: a traceback in place of a refusal.
    names += [
        "owner/a--b",
        "owner/a..b",
        "owner/a.git",
        "owner/a-",
        "owner/a.",
        "owner/" + "a" * 91,
        "owner/é",
    ]
    assert [name for name in names if is_hub_name(name)] == ["gpt2", "owner/model-1.5B_x"]


@pytest.mark.parametrize(
    ("files", "missing", "complete"),
    [
        (WHOLE, "", True),
        (SHARDED, "", True),
        *((WHOLE, file, False) for file in WHOLE),
        # Mutation: any safetensors will do -> a download that was interrupted is loaded with half its weights.
        *((SHARDED, file, False) for file in ("model-1.safetensors", "model-2.safetensors")),
    ],
)
def test_a_snapshot_is_a_model_when_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], missing: str, complete: bool
) -> None:
    for name, text in files.items():
        if name != missing:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path))
    assert hub_folder("owner/model", local_files_only=True) == (tmp_path if complete else None)


def test_the_hub_is_asked_whether_it_has_a_model() -> None:
    # Mutations: any error a refusal -> a Hub that is down refuses good names; 401 an outage -> a typo is let through,
    # for the Hub answers so to those without a token.
    with hub_server():
        found = {name: ask_hub(f"owner/{name}") for name in ("there", "typo", "gone", "gated", "down")}
    assert {name: answer.has_model for name, answer in found.items()} == {
        "there": True,
        "typo": False,
        "gone": False,
        "gated": False,
        "down": None,
    }
    assert [found[name].detail for name in ("typo", "gone", "gated")] == ["401", "404", "403"]
    assert found["down"].detail.startswith("HfHubHTTPError: ")
    assert "503" in found["down"].detail
