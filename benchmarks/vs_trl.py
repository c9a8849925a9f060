"""The same GRPO work with asyncrl and with TRL's GRPOTrainer, alternating on the same cores, on a CPU.

    python benchmarks/vs_trl.py --task first_word     about 19 minutes on 2 cores
    python benchmarks/vs_trl.py --task long           about 20 minutes (half with --rounds 1)
    python benchmarks/vs_trl.py --task tiny           about 5 minutes
    python benchmarks/vs_trl.py --task first_word --probe     which mode of asyncrl is fastest; no TRL

Needs `pip install trl datasets accelerate`, an otherwise idle machine, and the model on the disk (made or
fetched at the start). A round is: TRL, then asyncrl, each a process of its own, each from the initial model,
on the same prompts in the same order. Left out on both sides: start-up and the first version; for asyncrl the
last version too, which is not published. Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine, package_versions, print_result, use_cores
from runs import REPOSITORY, FinishedRun, run_child, say, train
from trl_spec import TrlSpec, same_work

from asyncrl.config import load_config

MODES = ("overlapped", "overlapped-shared-cores", "synchronous")
"""One half of the cores a role, S = 2; every core for both roles, S = 2; every core for both in turn, S = 0."""


@dataclass(frozen=True, slots=True)
class Task:
    """The work of both sides, and how much of it is measured by default."""

    config: str
    overrides: tuple[str, ...]
    bar: float
    """Ratio of completion tokens per second that is asked for."""
    mode: str
    """The fastest one of asyncrl, by --probe."""
    trl_per_device_batch_size: int
    trl_steps: int
    versions: int
    rounds: int = 2


SMOLLM2 = ("algorithm.advantages.scale=none", "learner.lr=1e-5", "learner.warmup_versions=0")
TASKS = {
    "first_word": Task("configs/quickstart.yaml", SMOLLM2, 5.0, "overlapped", 32, trl_steps=4, versions=4),
    "long": Task(
        "configs/quickstart.yaml",
        (*SMOLLM2, "data.train=stories:rows", "reward=stories:reward", "rollout.max_completion_tokens=64"),
        2.0,
        "overlapped",
        16,
        trl_steps=1,
        versions=3,
    ),
    "tiny": Task(
        "configs/tiny.yaml",
        ("algorithm.advantages.scale=none",),
        3.0,
        "overlapped-shared-cores",
        128,
        trl_steps=20,
        versions=20,
    ),
}


@dataclass(frozen=True, slots=True)
class Round:
    """What one side did in one round; the measured versions only, but for `rewards`."""

    side: str
    completion_tokens: int
    seconds: float
    versions: int
    completion_tokens_per_s: float
    seconds_per_version: float
    tokens_per_version: list[int]
    rewards: list[float]
    """Mean reward of every version, the first included."""
    tokens_generated_per_trained: float | None = None
    """asyncrl: generated while the measured versions ran, over those trained. Under 1 the stock shrank."""


def overrides_of(task: Task, mode: str, cores: Sequence[int], num_versions: int, seed: int) -> list[str]:
    """What is put on top of the task's config file."""
    both = f"{{learner: {list(cores)}, rollout_server: {list(cores)}}}"
    of_mode = {
        "overlapped": ["max_staleness=2"],
        "overlapped-shared-cores": ["max_staleness=2", f"resources.cores={both}"],
        "synchronous": ["max_staleness=0", f"resources.cores={both}"],
    }[mode]
    return [
        *task.overrides,
        *of_mode,
        f"learner.max_versions={num_versions}",
        "learner.export=false",
        f"seed={seed}",
    ]


def run_asyncrl(
    task: Task, mode: str, cores: Sequence[int], num_versions: int, seed: int, folder: Path, name: str
) -> Round:
    """One run of `asyncrl train`; all of its versions but the first and the last are measured."""
    overrides = overrides_of(task, mode, cores, num_versions + 2, seed)
    finished = train(REPOSITORY / task.config, overrides, folder=folder, name=name, timeout_s=3600)
    measured = slice(1, -1)
    return summarise(
        "asyncrl",
        [int(tokens) for tokens in finished.column("batch/completion_tokens")[measured]],
        sum(finished.column("timing_s/step")[measured]),
        finished.column("critic/score/mean"),
        generated=_tokens_generated(finished, last_index=num_versions),
    )


def _tokens_generated(finished: FinishedRun, last_index: int) -> int:
    """Completion tokens of the groups that were finished between the steps of batch 0 and `last_index`."""
    ends = {e["version"]: e["end_s"] for e in finished.events if e["name"] == "step"}
    start_s, end_s = ends[0], ends[last_index]
    groups = [e for e in finished.events if e["name"] == "generate" and start_s < e["end_s"] <= end_s]
    return sum(int(group["tokens"]) for group in groups)


def run_trl(spec: TrlSpec, folder: Path, name: str) -> Round:
    """One process of trl_side.py; all of its steps but the first are measured."""
    spec_file, result_file = folder / f"{name}.json", folder / f"{name}-result.json"
    spec_file.write_text(json.dumps(asdict(spec)))
    threads = str(spec.num_threads)
    run_child(
        [sys.executable, "trl_side.py", str(spec_file), str(result_file)],
        log=folder / f"{name}.log",
        timeout_s=3600,
        environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    steps = json.loads(result_file.read_text())["steps"]
    return summarise(
        "trl",
        [step["completion_tokens"] for step in steps[1:]],
        steps[-1]["end_s"] - steps[0]["end_s"],
        [step["reward_mean"] for step in steps],
    )


def summarise(
    side: str, tokens: list[int], seconds: float, rewards: list[float], generated: int | None = None
) -> Round:
    """The figures of one round from the tokens of each measured version and the seconds of all of them."""
    share = None if generated is None else generated / sum(tokens)
    result = Round(
        side,
        sum(tokens),
        seconds,
        len(tokens),
        sum(tokens) / seconds,
        seconds / len(tokens),
        tokens,
        rewards,
        share,
    )
    say(
        f"{side}: {result.completion_tokens_per_s:.1f} completion tokens/s, {result.seconds_per_version:.2f} s"
    )
    return result


def compare(arguments: argparse.Namespace, cores: list[int], folder: Path) -> dict[str, Any]:
    """Alternating rounds of both sides; the medians over rounds and their ratio."""
    task = TASKS[arguments.task]
    mode = arguments.mode or task.mode
    num_steps, num_versions = arguments.trl_steps or task.trl_steps, arguments.versions or task.versions
    overrides = overrides_of(task, mode, cores, num_versions + 2, arguments.seed)
    config = load_config(REPOSITORY / task.config, overrides)
    spec = same_work(
        config,
        num_steps=num_steps + 1,
        per_device_batch_size=arguments.trl_batch or task.trl_per_device_batch_size,
        num_threads=len(cores),
        output_dir=folder / "trl",
    )
    rounds: list[Round] = []
    for number in range(arguments.rounds or task.rounds):
        rounds.append(run_trl(spec, folder, f"trl-{number}"))
        rounds.append(run_asyncrl(task, mode, cores, num_versions, arguments.seed, folder, f"ours-{number}"))
    medians = {
        side: {
            figure: statistics.median(getattr(r, figure) for r in rounds if r.side == side)
            for figure in ("completion_tokens_per_s", "seconds_per_version")
        }
        for side in ("asyncrl", "trl")
    }
    ratio = medians["asyncrl"]["completion_tokens_per_s"] / medians["trl"]["completion_tokens_per_s"]
    return {
        "what": (
            f"GRPO on the task {arguments.task}: {spec.prompts_per_batch} prompts x {spec.group_size} completions "
            f"of at most {spec.max_completion_tokens} tokens a version, float32, on {len(cores)} cores; TRL "
            "(transformers generation: its vLLM modes need NVIDIA GPUs) and asyncrl in turn, each from the "
            "initial model on the same prompts in the same order; completion tokens of trained batches over "
            "wall time, without start-up and the first version; ratio of the medians over rounds"
        ),
        "settings": {
            "asyncrl": {"mode": mode, "config": task.config, "overrides": overrides},
            "trl": spec.trainer_arguments() | {"torch_threads": spec.num_threads, "dtype": "float32"},
        },
        "rounds": [asdict(r) for r in rounds],
        "medians": medians,
        "ratio": ratio,
        "ratio_of_seconds_per_version": medians["trl"]["seconds_per_version"]
        / medians["asyncrl"]["seconds_per_version"],
        "bar": task.bar,
        "passed": ratio >= task.bar,
    }


def probe(arguments: argparse.Namespace, cores: list[int], folder: Path) -> dict[str, Any]:
    """One run of asyncrl in every mode."""
    task = TASKS[arguments.task]
    num_versions = arguments.versions or task.versions
    rounds = {m: run_asyncrl(task, m, cores, num_versions, arguments.seed, folder, m) for m in MODES}
    return {
        "what": f"asyncrl alone on the task {arguments.task}, in every mode, on {len(cores)} cores",
        "modes": {mode: asdict(result) for mode, result in rounds.items()},
        "fastest": max(rounds, key=lambda mode: rounds[mode].completion_tokens_per_s),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="first_word")
    parser.add_argument("--rounds", type=int, help="rounds of TRL, then asyncrl")
    parser.add_argument("--trl-steps", type=int, help="steps of TRL measured in a round, after the first")
    parser.add_argument(
        "--versions", type=int, help="versions of asyncrl measured in a round, after the first"
    )
    parser.add_argument("--trl-batch", type=int, help="completions of one TRL microbatch")
    parser.add_argument("--mode", choices=MODES, help="of asyncrl; default: the fastest known for the task")
    parser.add_argument("--cores", type=int, default=2, help="cores that both sides use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe", action="store_true", help="only asyncrl, in every mode")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = {"machine": describe_machine(), "versions": package_versions()}
    cores = use_cores(arguments.cores)
    with tempfile.TemporaryDirectory(prefix="asyncrl-vs-trl-") as folder:
        result = (probe if arguments.probe else compare)(arguments, cores, Path(folder))
    print_result(about | {"task": arguments.task} | result)


if __name__ == "__main__":
    main()
