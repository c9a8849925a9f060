"""The `vllm.general_plugins` entry point: tells vLLM of the weight-transfer backend "asyncrl".

vLLM calls `register` in every one of its processes, so nothing heavy is imported here; the backend itself
is imported by the worker that creates it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from multiprocessing.util import Finalize

BACKEND = "asyncrl"
IN_OUR_ENGINE = "ASYNCRL_ENGINE"
"""Environment variable of a rollout server: vLLM's processes below it are ours to end."""


def register() -> None:
    """Registers the backend once, however often it is called.

    Below a rollout server it also makes vLLM's processes end: at once when their work is done, and with their
    parent. Every other vLLM program of this environment, which loads the plug-in too, is left alone.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyncrl.weight_sync.vllm_backend", "SnapshotWeightTransfer"
        )
        if IN_OUR_ENGINE in os.environ and multiprocessing.parent_process() is not None:
            Finalize(None, leave_at_once, exitpriority=-1000)  # behind all other finalizers
            threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()


def end_with_parent() -> None:
    """Waits for the end of the process that started this one, then ends this one at once.

    An engine core whose rollout server was killed (by the system, short of memory, say) waits for requests for
    ever, and keeps its memory. Its workers do notice that it is gone.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def leave_at_once() -> None:
    """Ends a process whose work is done and cleaned up, without taking its interpreter apart.

    Python would spend some 4 s on that (it goes through 600,000 objects of 5,000 modules), more than vLLM
    waits for before it kills. A process that fails is left alone: its exit code says so.
    """
    error = sys.exc_info()[1]  # what is on its way out of the process's target function
    if error is None or (isinstance(error, SystemExit) and not error.code):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
