"""What W&B has written offline: a log in the format of LevelDB, its records in protocol buffers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)


def records(path: Path) -> Iterator[bytes]:
    """The records of one ``.wandb`` file."""
    data, at, held = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        held = held + piece if kind in (_MIDDLE, _LAST) else piece
        if kind in (_FULL, _LAST) and held:
            yield held
            held = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of the one offline run below ``folder``, as W&B would sync them."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            rows.append({"_step": record.history.step.num, **row})
    return rows
