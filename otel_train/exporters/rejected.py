"""Requests that were refused for good, in ``spool/rejected/``: read again, sent again, kept while they are refused."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train.atomic import dump_json, replace_text
from otel_train.exporters.jsonl import predecessor
from otel_train.exporters.otlp_answer import Verdict
from otel_train.files import lines_of, open_binary, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from otel_train.exporters.otlp_answer import Answer

_MOST_LINE_BYTES: Final = 32 << 20
"""Longer than the file may be."""


class RejectedRequest(NamedTuple):
    """One line of the file.

    Attributes:
        stored: as it lies there, without the newline.
        request: to send; None where the line cannot be read.
    """

    stored: bytes
    request: bytes | None


def parts_of(path: Path) -> list[Path]:
    """A bounded file and its older half, oldest first."""
    return [part for part in (predecessor(path), path) if os.path.lexists(part)]


def rejected_in(path: Path) -> list[RejectedRequest]:
    """The requests of one signal, oldest first.

    Raises:
        OSError: the file is there but cannot be read.
    """
    found = []
    for part in parts_of(path):
        with open_binary(part) as file:
            found += [_read(line.rstrip(b"\n")) for line in lines_of(file, _MOST_LINE_BYTES) if line.strip()]
    return found


def send_again(path: Path, send: Callable[[bytes], Answer | None]) -> list[Answer]:
    """Send every request again and take away those that are accepted. Call it with the lock of the queue.

    Args:
        path: the file of one signal.
        send: sends a request; None as soon as nobody is there.

    Returns:
        The good answers: accepted, or refused again. What is not asked, or cannot be read, stays without one.

    Raises:
        OSError: the file cannot be read or written.
    """
    waiting = rejected_in(path)
    answers: list[Answer] = []
    left: list[bytes] = []
    try:
        while waiting:
            entry = waiting[0]
            answer = send(entry.request) if entry.request is not None else None
            if answer is None and entry.request is not None:
                break
            if answer is not None:
                answers.append(answer)
            if answer is None or answer.verdict is not Verdict.ACCEPTED:
                left.append(entry.stored if answer is None else _stored(answer.reason, entry.request or b""))
            waiting.pop(0)
    finally:  # Ctrl-C in the middle must not send twice what has arrived
        _keep(path, [*left, *(entry.stored for entry in waiting)])
    return answers


def _keep(path: Path, stored: list[bytes]) -> None:
    if stored:
        replace_text(path, "".join(f"{line.decode('utf-8', 'replace')}\n" for line in stored))
    older, newer = predecessor(path), path
    older.unlink(missing_ok=True)
    if not stored:
        newer.unlink(missing_ok=True)
        with suppress(OSError):  # the other signal may have something there
            path.parent.rmdir()


def _stored(reason: str, request: bytes) -> bytes:
    return dump_json({"reason": reason, "line": request.decode("utf-8", "replace")}).encode(
        "utf-8", "replace"
    )


def _read(line: bytes) -> RejectedRequest:
    try:
        value = parse_json(line)
    except ValueError:
        value = None
    request = value.get("line") if isinstance(value, dict) else None
    return RejectedRequest(line, request.encode("utf-8", "replace") if isinstance(request, str) else None)
