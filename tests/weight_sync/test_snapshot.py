"""Snapshot files: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import SnapshotGone, WeightSyncError
from asyncrl.weight_sync.manifest import ITEMSIZES, Manifest, decode_manifest, lay_out
from asyncrl.weight_sync.shm import ShmTransport
from asyncrl.weight_sync.snapshot import SnapshotWriter, map_readonly, remove_all, verify

TENSORS = {
    "embed": torch.arange(15, dtype=torch.float32).reshape(5, 3),
    "scale": torch.tensor(2.5),
    "norm": torch.tensor([1.0, -2.0, 3.0, 0.1]),
}


def layout_of(tensors: dict[str, torch.Tensor], dtype: str = "float32", version: int = 12) -> Manifest:
    return lay_out(
        ((name, tuple(t.shape), dtype, ITEMSIZES[dtype]) for name, t in tensors.items()), "inc1", version
    )


def write(folder: Path, tensors: dict[str, torch.Tensor], dtype: str = "float32") -> tuple[str, Manifest]:
    writer = SnapshotWriter(str(folder), "run-a")
    layout = layout_of(tensors, dtype)
    path = writer.create(layout)
    for entry in layout.tensors:
        writer.write_rows(entry, 0, tensors[entry.name])
    return path, writer.finish(writer.digest(layout.tensors))


def read(path: str, manifest: Manifest) -> dict[str, torch.Tensor]:
    with map_readonly(path, manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture
def snapshot(tmp_path: Path) -> tuple[str, Manifest]:
    return write(tmp_path, TENSORS)


def test_the_file_is_named_after_run_incarnation_and_version(snapshot: tuple[str, Manifest]) -> None:
    assert Path(snapshot[0]).name == "asyncrl-run-a-inc1-v000012.weights"


# Caught: offsets off by one row in write_rows; views that ignore entry.offset.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
    num_ranks=st.integers(1, 3),
)
def test_rows_written_by_several_ranks_are_read_back_in_the_publish_dtype(
    tmp_path: Path, shapes: list[tuple[int, ...]], dtype: str, num_ranks: int
) -> None:
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    layout = layout_of(tensors, dtype)
    writers = [SnapshotWriter(str(tmp_path), "run-a") for _ in range(num_ranks)]
    path = writers[0].create(layout)
    digests: dict[str, str] = {}
    for rank, writer in enumerate(writers):
        if rank:
            writer.open(layout)
        for entry in layout.tensors:
            tensor = tensors[entry.name]
            if not entry.shape:
                if rank == 0:
                    writer.write_rows(entry, 0, tensor)
                continue
            each = -(-tensor.shape[0] // num_ranks)
            rows = tensor[rank * each : (rank + 1) * each]
            writer.write_rows(entry, min(rank * each, tensor.shape[0]), rows)
    for rank, writer in enumerate(writers):
        digests |= writer.digest(layout.tensors[rank::num_ranks])
    manifest, *_ = [writer.finish(digests) for writer in writers]
    try:
        verify(path, manifest)
        expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        found = read(path, manifest)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            raw = (
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            )
            assert digests[name] == blake3(raw).hexdigest()
    finally:
        os.unlink(path)


# Caught: a digest of the wrong slice, of a copy made earlier, or a comparison left out.
@pytest.mark.parametrize("name", list(TENSORS))
def test_one_flipped_bit_is_found_and_the_tensor_named(snapshot: tuple[str, Manifest], name: str) -> None:
    path, manifest = snapshot
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    with open(path, "r+b") as file:
        file.seek(entry.offset + entry.num_bytes - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightSyncError, match=f"version 12: {name} in .* has the digest"):
        verify(path, manifest)


def test_a_manifest_without_digests_does_not_verify(tmp_path: Path) -> None:
    path, manifest = write(tmp_path, TENSORS)
    bare = msgspec.structs.replace(
        manifest, tensors=tuple(msgspec.structs.replace(entry, digest="") for entry in manifest.tensors)
    )
    with pytest.raises(WeightSyncError, match="the manifest says nothing"):
        verify(path, bare)


def test_a_file_of_another_size_is_refused(snapshot: tuple[str, Manifest]) -> None:
    path, manifest = snapshot
    os.truncate(path, manifest.total_bytes - 64)
    for attempt in (lambda: verify(path, manifest), lambda: read(path, manifest)):
        with pytest.raises(WeightSyncError, match=r"has 128 bytes, the manifest of version 12 says 192"):
            attempt()


def test_the_shm_transport_stages_the_learners_own_file(snapshot: tuple[str, Manifest]) -> None:
    assert asyncio.run(ShmTransport().stage(*snapshot)) == snapshot[0]


def test_a_vanished_file_is_gone_and_not_broken(snapshot: tuple[str, Manifest]) -> None:
    path, manifest = snapshot
    os.unlink(path)
    with pytest.raises(SnapshotGone, match="of version 12 is not there"):
        asyncio.run(ShmTransport().stage(path, manifest))
    with pytest.raises(SnapshotGone):
        read(path, manifest)


def test_an_open_map_outlives_the_file_and_a_kept_view_outlives_the_map(
    snapshot: tuple[str, Manifest],
) -> None:
    path, manifest = snapshot
    with map_readonly(path, manifest) as tensors:
        os.unlink(path)
        kept = dict(tensors)["norm"]
    assert torch.equal(kept, TENSORS["norm"])
    assert path in Path("/proc/self/maps").read_text()
    del kept
    assert path not in Path("/proc/self/maps").read_text()


# Caught: a private or writable map instead of a read-only one.
def test_a_write_through_a_view_faults(snapshot: tuple[str, Manifest]) -> None:
    path, manifest = snapshot
    code = (
        "import sys\n"
        "from asyncrl.weight_sync.manifest import decode_manifest\n"
        "from asyncrl.weight_sync.snapshot import map_readonly\n"
        "with map_readonly(sys.argv[1], decode_manifest(sys.argv[2].encode())) as tensors:\n"
        "    next(tensors)[1].zero_()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, path, manifest.encode()], timeout=120, check=False)
    assert ended.returncode == -11
    verify(path, manifest)


def test_verify_needs_no_torch(snapshot: tuple[str, Manifest]) -> None:
    path, manifest = snapshot
    code = (
        "import sys\n"
        "from asyncrl.weight_sync.manifest import decode_manifest\n"
        "from asyncrl.weight_sync.snapshot import verify\n"
        "verify(sys.argv[1], decode_manifest(sys.argv[2].encode()))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, path, manifest.encode()], timeout=120, check=True)


def test_too_little_room_names_what_is_needed_and_leaves_nothing(tmp_path: Path) -> None:
    writer = SnapshotWriter(str(tmp_path), "run-a")
    too_large = layout_of({"w": torch.empty(1, 1 << 58, device="meta")})
    with pytest.raises(WeightSyncError, match=rf"needs {too_large.total_bytes} bytes and .* has \d+ free"):
        writer.create(too_large)
    assert not list(tmp_path.iterdir())


def test_an_existing_version_is_not_overwritten(snapshot: tuple[str, Manifest], tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="cannot be created: File exists"):
        SnapshotWriter(str(tmp_path), "run-a").create(layout_of(TENSORS))
    verify(*snapshot)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    writer = SnapshotWriter(str(tmp_path), "run-a")
    layout = layout_of(TENSORS)
    writer.create(layout)
    for row_offset, rows in ((4, torch.zeros(2, 3)), (0, torch.zeros(2, 4)), (-1, torch.zeros(1, 3))):
        with pytest.raises(WeightSyncError, match=r"do not fit embed of shape \(5, 3\)"):
            writer.write_rows(layout.tensors[0], row_offset, rows)
    writer.close()


def test_finish_names_a_tensor_without_a_digest(tmp_path: Path) -> None:
    writer = SnapshotWriter(str(tmp_path), "run-a")
    layout = layout_of(TENSORS)
    writer.create(layout)
    with pytest.raises(WeightSyncError, match="version 12 has no digest of norm"):
        writer.finish(writer.digest(layout.tensors[:2]))
    writer.close()


# Caught: a prefix match, which would take the files of run "a-b" for those of run "a".
def test_leftovers_of_one_run_only_are_removed(tmp_path: Path) -> None:
    for run_id, incarnation in (("a", "i1"), ("a", "i2"), ("a-b", "i1"), ("a-b", "c"), ("b", "i1")):
        writer = SnapshotWriter(str(tmp_path), run_id)
        writer.create(lay_out([("w", (2,), "float32", 4)], incarnation, 3))
        writer.finish({"w": ""})
    assert remove_all(str(tmp_path), "a") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "asyncrl-a-b-c-v000003.weights",
        "asyncrl-a-b-i1-v000003.weights",
        "asyncrl-b-i1-v000003.weights",
    ]
    with pytest.raises(WeightSyncError, match=r"incarnation 'b-i1' must be"):
        SnapshotWriter(str(tmp_path), "a").unlink("b-i1", 3)


def test_leftovers_that_cannot_be_looked_for_raise_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert remove_all(str(tmp_path / "no-such-folder"), "a") == 0
    assert "snapshots of run a may be left" in caplog.text


# Caught: close that keeps the file; close by a rank that did not create it, or after finish, that unlinks it.
def test_only_a_file_that_its_creator_did_not_finish_goes_with_close(tmp_path: Path) -> None:
    layout = layout_of(TENSORS)
    first, other = (SnapshotWriter(str(tmp_path), "run-a") for _ in range(2))
    path = Path(first.create(layout))
    other.open(layout)
    other.close()
    assert path.exists()
    first.close()
    assert not path.exists()
    first.create(layout)
    first.finish(first.digest(layout.tensors))
    first.close()
    assert path.exists()


# Caught: close that raises BufferError, for a view that the interrupted write still holds, before it unlinks.
def test_a_writer_killed_in_the_middle_of_a_write_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from asyncrl.weight_sync.manifest import lay_out\n"
        "from asyncrl.weight_sync.snapshot import SnapshotWriter\n"
        "class Interrupting(torch.Tensor):\n"
        "    def detach(self): os.kill(os.getpid(), signal.SIGTERM)\n"
        "def leave(*_): raise SystemExit(143)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "writer = SnapshotWriter(sys.argv[1], 'run-a')\n"
        "layout = lay_out([('w', (2,), 'float32', 4)], 'i', 0)\n"
        "try:\n"
        "    writer.create(layout)\n"
        "    writer.write_rows(layout.tensors[0], 0, Interrupting(2))\n"
        "finally:\n"
        "    assert os.listdir(sys.argv[1])\n"
        "    writer.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == 143
    assert not list(tmp_path.iterdir())


def test_a_manifest_whose_tensors_do_not_lie_in_its_file_is_refused() -> None:
    layout = layout_of(TENSORS)
    assert decode_manifest(layout.encode()) == layout
    first = layout.tensors[0]
    for change in (
        {"num_bytes": 56},
        {"dtype": "float64"},
        {"offset": 8},
        {"offset": 192},
        {"shape": (4, 3)},
    ):
        broken = msgspec.structs.replace(
            layout, tensors=(msgspec.structs.replace(first, **change), *layout.tensors[1:])
        )
        with pytest.raises(WeightSyncError, match="not a manifest: embed"):
            decode_manifest(broken.encode())
