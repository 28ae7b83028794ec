"""The record that lies beside each trace: who asked, which steps, what is missing, what was found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from otel_train.atomic import replace_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUFFIX = ".json.gz"
RECORD_SUFFIX = ".record.json"
TOP = 10
"""Entries of each list in a record; of operators and kernels, those that the analysis was asked for."""

MOST_TOP = 100
"""Of operators and kernels, too: the largest ``capture_top``."""

_MOST = {"top_cpu_ops": MOST_TOP, "top_cuda_ops": MOST_TOP, "memory_peaks": TOP, "findings": TOP}


def record_of(path: Path) -> Path:
    """Where the record of a trace is."""
    return path.with_name(path.name.removesuffix(SUFFIX) + RECORD_SUFFIX)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a capture's record as a whole.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """A record; empty where there is none that can be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def claim_of(record: Mapping[str, Any]) -> str:
    """What the leading finding of a capture says; "" while there is none."""
    finding = record.get("finding")
    return str(finding.get("claim", "")) if isinstance(finding, dict) else ""


def records_of(captures: Path) -> list[dict[str, Any]]:
    """The records in a folder of captures, the oldest first; one that cannot be read is left out."""
    found = [record for path in captures.glob(f"*{RECORD_SUFFIX}") if (record := read_record(path))]
    return sorted(found, key=lambda record: (record.get("ended_unix_ns") or 0, record.get("rank") or 0))


def note_analysis(trace: Path, document: Mapping[str, Any]) -> bool:
    """Put the leading finding of a trace's analysis into its record, if it has one without a finding.

    Args:
        trace: the file that was analysed.
        document: what ``otel_train.analyze`` found.

    Returns:
        Whether it was put there.
    """
    path = record_of(trace)
    record = read_record(path)
    if not record or record.get("finding"):
        return False
    leading: Mapping[str, Any] = next(iter(document["findings"]), {})
    try:
        tops = {key: document[key][:most] for key, most in _MOST.items()}
        write_record(path, {**record, "finding": leading, "stages": document["breakdown"]["stages"], **tops})
    except OSError:
        return False  # somebody else's directory, read only: the finding is printed all the same
    return True
