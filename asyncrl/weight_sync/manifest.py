"""The manifest: what one snapshot file holds, tensor by tensor, agreed on before the first byte is read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from asyncrl.errors import WeightSyncError


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One full tensor of the model, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """float32 | bfloat16 | float16"""
    offset: int
    """First byte in the file; a multiple of ALIGNMENT_BYTES."""
    num_bytes: int
    digest: str
    """blake3 of the tensor's bytes, hex; empty until the snapshot is finished."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a snapshot holds. Tied tensors appear once, under the name Hugging Face saves them with."""

    incarnation: str
    version: int
    total_bytes: int
    tensors: tuple[TensorEntry, ...]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


ALIGNMENT_BYTES = 64
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element of each publish dtype."""


def decode_manifest(raw: bytes) -> Manifest:
    """Raises WeightSyncError when `raw` is not a manifest, or one whose tensors do not lie in its file."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise WeightSyncError(f"not a manifest: {error}") from error
    for entry in manifest.tensors:
        if entry.num_bytes != ITEMSIZES.get(entry.dtype, -1) * math.prod(entry.shape):
            raise WeightSyncError(
                f"not a manifest: {entry.name} of shape {entry.shape} in {entry.dtype} has {entry.num_bytes} bytes"
            )
        if entry.offset % ALIGNMENT_BYTES or not 0 <= entry.offset <= manifest.total_bytes - entry.num_bytes:
            raise WeightSyncError(
                f"not a manifest: {entry.name} of {entry.num_bytes} bytes at {entry.offset} does not lie in a "
                f"file of {manifest.total_bytes}"
            )
    return manifest


def lay_out(
    tensors: Iterable[tuple[str, tuple[int, ...], str, int]], incarnation: str, version: int
) -> Manifest:
    """Places tensors one after another. Items: (name, shape, dtype, bytes an element)."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, shape, dtype, itemsize in tensors:
        num_bytes = itemsize
        for extent in shape:
            num_bytes *= extent
        entries.append(TensorEntry(name, shape, dtype, offset, num_bytes, digest=""))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Manifest(incarnation, version, offset, tuple(entries))
