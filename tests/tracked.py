"""Reads back what trackers wrote, without the code that wrote it."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 15
Curves = dict[str, list[tuple[int, float]]]


def event_curves(folder: Path) -> Curves:
    """What TensorBoard's own reader shows of a folder: it checks the sums, and honours purge steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def log_records(file: Path) -> Iterator[bytes]:
    """The records of a transaction log, as wandb and swanlab write them: LevelDB's format, with zlib's sums."""
    data, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        checksum, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if left < 7 or kind == 0:
            place += left
            continue
        part = data[place + 7 : place + 7 + length]
        assert zlib.crc32(bytes([kind]) + part) == checksum, f"{file} is damaged at {place}"
        place += 7 + length
        record += part
        if kind in (1, 4):
            yield record
            record = b""


def wandb_log(file: Path) -> tuple[Any, Curves]:
    """The record of the run, and the curves."""
    from wandb.proto.wandb_internal_pb2 import Record

    run, curves = None, Curves()
    for record in map(Record.FromString, log_records(file)):
        if record.WhichOneof("record_type") == "run":
            run = run or record.run
        if record.WhichOneof("record_type") == "history":
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                curves.setdefault(name, []).append((record.history.step.num, values[name]))
    return run, curves


def swanlab_log(file: Path) -> tuple[Any, Curves]:
    """The record of the start, and the curves."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    start, curves = None, Curves()
    for record in map(Record.FromString, log_records(file)):
        if record.HasField("start"):
            start = record.start
        if record.HasField("scalar"):
            scalar = record.scalar
            curves.setdefault(scalar.key, []).append((scalar.step, scalar.value.number))
    return start, curves


def mlflow_files(folder: Path) -> tuple[dict[str, str], Curves]:
    """The parameters of the only run, and the curves: a line has time, value and step."""
    (run,) = (path.parent for path in folder.glob("*/*/params"))
    curves = {
        file.name: [(int(step), float(value)) for _, value, step in map(str.split, file.read_text().splitlines())]
        for file in (run / "metrics").iterdir()
    }
    return {file.name: file.read_text() for file in (run / "params").iterdir()}, curves


def metric_curves(file: Path) -> Curves:
    """The curves in metrics.jsonl."""
    curves = Curves()
    for record in map(json.loads, file.read_text().splitlines()):
        for name in record.keys() - {"step", "max_steps", "time", "clock", "job", "attempt", "resumed_from"}:
            if record[name] is not None:
                curves.setdefault(name, []).append((record["step"], record[name]))
    return curves
