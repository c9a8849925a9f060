"""Imports run one way, as docs/design.md draws it. Read from the source, so lazy imports count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "asyncrl"

LAYERS = [
    {"types", "config", "errors", "dtypes", "cache", "hub", "user_code", "checkpoint_folder"},
    {"algorithms", "envs", "models", "stream", "run_directory", "trackers", "model_card"},
    {"coordinator", "rollout_server", "learner", "weight_sync"},
    {"launch"},
    {"check", "export"},
    {"cli", "trainer"},
]
"""A part imports from lower layers and from itself."""
WITHIN_A_LAYER = {
    ("config", "errors"),
    ("config", "user_code"),  # a recipe of the user's own
    ("user_code", "errors"),
    ("dtypes", "config"),
    ("models", "envs"),  # the tiny model is warmed up on a demonstration task
    ("learner", "weight_sync"),  # both ends of a version's way: the manifest, the snapshot, the transports
    ("rollout_server", "weight_sync"),
}
"""All the exceptions there are."""

LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def imports_between_parts() -> set[tuple[str, str]]:
    """(importing part, imported part), where a part is a folder or module right below asyncrl/."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":  # the names that `import asyncrl` offers
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative imports hide what is imported"
                # `from asyncrl import x` and `from asyncrl.x import y`
                names = [node.module or ""]
                if node.module == "asyncrl":
                    names = [f"asyncrl.{alias.name}" for alias in node.names]
            found |= {(part, name.split(".")[1]) for name in names if name.startswith("asyncrl.")}
    return {(part, imported) for part, imported in found if part != imported}


def test_every_part_has_a_layer():
    # Mutation: add a folder to asyncrl/ -> it is missing here, and the next test would not know it.
    parts = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__"} == set(LAYER_OF)


def test_imports_run_from_higher_layers_to_lower_ones():
    # Mutation: import asyncrl.coordinator in stream/outbox.py -> ("stream", "coordinator").
    upwards = {(a, b) for a, b in imports_between_parts() if LAYER_OF[a] < LAYER_OF[b]}
    assert upwards == set()


def test_within_a_layer_only_the_named_exceptions_import_each_other():
    # Mutation: import rollout_server in learner/loop.py -> ("learner", "rollout_server"). An exception that is
    # no longer needed shows as well.
    sideways = {(a, b) for a, b in imports_between_parts() if LAYER_OF[a] == LAYER_OF[b]}
    assert sideways == WITHIN_A_LAYER


def test_rollout_server_and_learner_never_import_each_other():
    # Mutation: as above; said apart because the exceptions must never grow to allow it.
    both = {("rollout_server", "learner"), ("learner", "rollout_server")}
    assert both & (imports_between_parts() | WITHIN_A_LAYER) == set()


@pytest.mark.parametrize(
    "module",
    [
        "asyncrl.coordinator.coordinator",
        "asyncrl.launch.run",
        "asyncrl.check",
        "asyncrl.rollout_server.server",
        "asyncrl.weight_sync.vllm_plugin",
    ],
)
def test_light_processes_load_no_torch(module: str):
    # Mutation: import AutoTokenizer in envs/dataset.py, or torch at the top of weight_sync/snapshot.py.
    program = f"import sys, {module}; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
