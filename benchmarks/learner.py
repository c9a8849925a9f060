"""One whole learner update against the roofline, the plain padded path and TRL's GRPOTrainer on the same batch.

    python benchmarks/learner.py [--rounds 2] [--groups 8] [KEY=VALUE ...]

SmolLM2-135M in float32; random tokens whose completion lengths are lognormal (sigma 0.8). Each path is a process of its
own and they take turns, `rounds` times. Prints JSON: trained tokens/s, the share of the roofline (useful FLOPs over the
rate of the model's own GEMM shapes, which the same process measures after every update), the peak memory above
weights, gradients and moments. TRL must be installed: pip install 'asyncrl[bench]'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner_batch import BatchSpec, ModelShape, Work, draw_groups, useful_work
from machine import describe_machine, package_versions, print_result, use_cores
from runs import run_child, say

from asyncrl.launch.model_facts import read_tensor_shapes
from asyncrl.models.source import resolve_model

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BYTES_A_PARAMETER = 16
"""Weight, gradient and AdamW's two moments, float32."""
BARS = {"roofline_share": 0.7, "times_trl": 1.5, "memory_of_padded": 0.5}


def roofline_s(work: Work, shape: ModelShape, rates: dict[str, float]) -> float:
    """The time of the useful FLOPs at the measured rates; attention at the body's own rate."""
    matrices = shape.matrices()
    flops = {name: float(i * o * n) for name, (i, o, n) in matrices.items()}
    total = sum(flops.values())
    body_rate = total / sum(flops[name] / rates[name] for name in flops)
    return (work.body + work.attention) / body_rate + work.head / rates["head"]


def main() -> None:
    arguments = parse_arguments()
    cores = use_cores(2)
    model = resolve_model(MODEL)
    shape = ModelShape.of(model)
    spec = BatchSpec(num_groups=arguments.groups, max_tokens_per_microbatch=arguments.microbatch)
    groups = draw_groups(spec, shape.vocabulary)
    work = useful_work(groups, shape)
    trained = sum(group.num_trained_tokens for group in groups)
    num_parameters = sum(_product(s) for s in read_tensor_shapes(model).values())
    found: dict[str, list[dict[str, Any]]] = {path: [] for path in arguments.paths}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        asked = {
            "batch": asdict(spec),
            "model": str(model),
            "threads": len(cores),
            "updates": arguments.updates,
        }
        (folder / "spec.json").write_text(json.dumps(asked | {"overrides": arguments.overrides}))
        for number in range(arguments.rounds):
            for path in arguments.paths:
                result = folder / f"{path}-{number}.json"
                command = [sys.executable, str(Path(__file__).with_name("learner_side.py")), path]
                command += [str(folder / "spec.json"), str(result)]
                run_child(command, log=folder / f"{path}.log", timeout_s=1800)
                found[path].append(json.loads(result.read_text()))
                say(f"{path}: {found[path][-1]['update_s']}")
    sides = {
        path: summarise(results, work, shape, trained, num_parameters) for path, results in found.items()
    }
    print_result(
        {
            "benchmark": "learner",
            "machine": describe_machine(),
            "packages": package_versions(),
            "batch": asdict(spec)
            | {"packed_tokens": sum(g.num_tokens for g in groups), "trained_tokens": trained},
            "useful_gflop": {name: value / 1e9 for name, value in asdict(work).items()},
            "paths": sides,
            "compared": compare(sides),
            "bars": BARS,
        }
    )


def summarise(
    results: list[dict[str, Any]], work: Work, shape: ModelShape, trained: int, num_parameters: int
) -> dict[str, Any]:
    """Medians over all updates of all rounds."""
    update_s = statistics.median(s for result in results for s in result["update_s"])
    rates = {
        name: statistics.median(r for result in results for r in result["gemm_flops_per_s"][name])
        for name in results[0]["gemm_flops_per_s"]
    }
    ideal_s = roofline_s(work, shape, rates)
    peak = statistics.median(result["peak_bytes"] for result in results)
    return {
        "update_s": update_s,
        "trained_tokens_per_s": trained / update_s,
        "roofline_s": ideal_s,
        "roofline_share": ideal_s / update_s,
        "gemm_gflops_per_s": {name: rate / 1e9 for name, rate in rates.items()},
        "peak_gb_above_weights_gradients_moments": (peak - BYTES_A_PARAMETER * num_parameters) / 1e9,
        "loss": results[-1]["loss"],
    }


def compare(sides: dict[str, dict[str, Any]]) -> dict[str, float]:
    ours = sides.get("asyncrl")
    if ours is None:
        return {}
    memory = "peak_gb_above_weights_gradients_moments"
    compared = {"roofline_share": ours["roofline_share"]}
    if "trl" in sides:
        compared["times_trl"] = sides["trl"]["update_s"] / ours["update_s"]
        compared["memory_of_trl"] = ours[memory] / sides["trl"][memory]
    if "padded" in sides:
        compared["times_padded"] = sides["padded"]["update_s"] / ours["update_s"]
        compared["memory_of_padded"] = ours[memory] / sides["padded"][memory]
    return compared


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often the paths take turns")
    parser.add_argument("--updates", type=int, default=2, help="measured updates of a process")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=4096, help="max_tokens_per_microbatch")
    parser.add_argument("--paths", nargs="+", default=["asyncrl", "padded", "trl"])
    parser.add_argument("overrides", nargs="*", help="of asyncrl's configuration")
    return parser.parse_args()


if __name__ == "__main__":
    main()
