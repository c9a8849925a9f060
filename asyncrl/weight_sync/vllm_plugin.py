"""The `vllm.general_plugins` entry point: tells vLLM of the weight-transfer backend "asyncrl".

vLLM calls `register` in every one of its processes, so nothing heavy is imported here; the backend itself
is imported by the worker that creates it.
"""

from __future__ import annotations

BACKEND = "asyncrl"


def register() -> None:
    """Registers the backend once, however often it is called."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyncrl.weight_sync.vllm_backend", "SnapshotWeightTransfer"
        )
