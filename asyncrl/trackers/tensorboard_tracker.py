"""TensorBoard: an event file in the run directory, one more each time it is resumed, so that
`tensorboard --logdir runs` shows runs by name.

Written with TensorBoard's own record writer and protocol buffers: its higher layers would load TensorFlow
where that is installed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from asyncrl.trackers.tracker import Sample, TrackedRun

FILE_VERSION = "brain.Event:2"
"""What the first record of an event file says."""


class TensorBoardTracker:
    """Numbers as scalars (float32, as the format has them), configuration and samples in the text view."""

    def check(self) -> None:
        pass

    def open(self, run: TrackedRun) -> None:
        path = run.folder / f"events.out.tfevents.{time.time():.0f}.{run.name}"
        self._records = RecordWriter(path.open("xb"))
        self._write(Event(wall_time=time.time(), file_version=FILE_VERSION))
        if run.first_version:  # TensorBoard drops what the files before have from this step on
            log = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=run.first_version + 1, session_log=log))
        lines = yaml.safe_dump(run.config, sort_keys=False).splitlines()
        code = "\n".join(f"    {line}" for line in lines)  # Markdown shows it as it is
        self._write_values(run.first_version, [_text("config", [code], shape=[])])

    def log_metrics(self, version: int, metrics: dict[str, float]) -> None:
        self._write_values(version, [Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()])

    def log_samples(self, version: int, samples: list[Sample]) -> None:
        rows = [Sample._fields, *samples]
        cells = ["" if cell is None else str(cell) for row in rows for cell in row]
        self._write_values(version, [_text("samples", cells, shape=[len(rows), len(Sample._fields)])])

    def close(self, *, succeeded: bool) -> None:
        self._records.close()

    def _write_values(self, step: int, values: Sequence[Summary.Value]) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _text(tag: str, cells: list[str], shape: list[int]) -> Summary.Value:
    """Of rank 0, or of rank 2: the text view shows that as a table, the first row as its head."""
    dims = [TensorShapeProto.Dim(size=size) for size in shape]
    tensor = TensorProto(
        dtype=DT_STRING,
        tensor_shape=TensorShapeProto(dim=dims),
        string_val=[cell.encode() for cell in cells],
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


TRACKER = TensorBoardTracker
