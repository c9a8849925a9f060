"""The weight-transfer backend "asyncrl": loads a snapshot file into the vLLM worker that it lives in.

`VllmEngine.apply` drives it, one update in two steps, so that the caller knows what a failure left behind:
`check` maps the file and compares the manifest with the model (the old weights are untouched whatever it
raises), `load` overwrites layer by layer (a failure leaves weights that can be neither served nor undone).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.manifest import Manifest, decode_manifest
from asyncrl.weight_sync.snapshot import map_readonly

# It warns at every update of layers that got no weight: rotary embeddings, which have none, and tied heads.
# `_load` itself raises when a parameter was left out.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One step of an update."""

    step: Literal["check", "load"]
    path: str
    manifest: str
    """The manifest as JSON."""


class SnapshotWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """start -> update(check) -> update(load) -> finish. An update that stops after check changes nothing."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._tensors: Iterator[tuple[str, torch.Tensor]] | None = None
        self._loading = False
        self._map = ExitStack()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Finds out what the model's tensors are called, before any update is timed."""
        self._expected = expected_tensors(self.model_config.hf_config)

    def start_weight_update(self) -> None:
        """The reload itself starts in `load`: until then a failure must leave the model as it is."""
        self._unmap()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises WeightSyncError in `check`; whatever `load` raises means that the model is broken."""
        if update_info.step == "check":
            manifest = decode_manifest(update_info.manifest.encode())
            if self._expected is None:
                raise WeightSyncError("init_transfer_engine was not called before the first update")
            check_names(manifest, self._expected)
            self._tensors = self._map.enter_context(map_readonly(update_info.path, manifest))
        else:
            self._load()

    def _load(self) -> None:
        if self._tensors is None:
            raise WeightSyncError("no snapshot was checked: nothing to load")
        self._loading = True
        to_load = {name for name, _ in self.model.named_parameters()}
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
            loaded = cast("Any", self.model).load_weights(self._tensors)
        if isinstance(loaded, set) and (left := sorted(to_load - loaded)):
            raise WeightSyncError(
                f"the snapshot left {len(left)} parameters as they were, among them {left[0]}"
            )

    def finish_weight_update(self) -> None:
        """Processes what waited for its whole layer, then unmaps: until here the file's bytes are in use."""
        if self._loading:
            with torch.device(self.device):
                finalize_layerwise_reload(self.model, self.model_config)
                self._repack_tied_heads()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self._loading = False
        self._unmap()

    def _repack_tied_heads(self) -> None:
        """A tied output head keeps a packed copy of the embedding that the reload does not refresh."""
        if self.model_config.hf_text_config.tie_word_embeddings:
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def _unmap(self) -> None:
        self._tensors = None
        self._map.close()

    def shutdown(self) -> None:
        self._unmap()


def expected_tensors(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a snapshot of the model must hold: its parameters as transformers names them.

    A tied tensor appears once, under the name of the parameter that comes first.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_names(manifest: Manifest, expected: dict[str, tuple[int, ...]]) -> None:
    """Raises WeightSyncError, naming a tensor, unless the manifest holds exactly the expected ones."""
    what = f"the snapshot of version {manifest.version}"
    shapes = {entry.name: entry.shape for entry in manifest.tensors}
    if missing := sorted(expected.keys() - shapes.keys()):
        raise WeightSyncError(f"{what} lacks {missing[0]} ({len(missing)} tensors missing)")
    if extra := sorted(shapes.keys() - expected.keys()):
        raise WeightSyncError(
            f"{what} has {extra[0]}, which the model does not know ({len(extra)} tensors extra)"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise WeightSyncError(f"{what} has {name} of shape {shapes[name]}, the model's is {shape}")
