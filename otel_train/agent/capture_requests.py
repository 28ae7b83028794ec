"""Captures that other programs ask for: a file in the folder of the rank, and the token of ``POST /capture``."""

from __future__ import annotations

import hmac
import json
import secrets
from typing import TYPE_CHECKING, Any

from otel_train.config.validation import variable_of
from otel_train.files import parse_json, read_bytes, replace_text
from otel_train.profiler.requests import REQUEST_FILE

if TYPE_CHECKING:
    from pathlib import Path

KEY_FILE = "capture-token"
_MOST_BYTES = 1 << 16
"""Of a request."""


class RequestFolder:
    """The folder of a rank: requests that are left there, and the token that opens ``POST /capture``.

    Args:
        folder: of the rank; None where there is no run directory, and where captures are off.
        token: made when empty.
    """

    def __init__(self, folder: Path | None, token: str) -> None:
        self._folder = folder
        self._token = token or secrets.token_urlsafe(24)

    def refusal(self, token: str) -> str:
        """Why a client that brings this token may not ask; "" where it may."""
        if hmac.compare_digest(token.encode(), self._token.encode()):
            return ""
        where = str(self._folder / KEY_FILE) if self._folder else variable_of("profiler_token")
        return f"the token is wrong or missing: 'Authorization: Bearer ...', see {where}"

    def publish(self) -> None:
        """Write the token to a file of the owner's alone."""
        if self._folder is not None:
            replace_text(self._folder / KEY_FILE, self._token + "\n")

    def withdraw(self) -> None:
        """Remove that file."""
        if self._folder is not None:
            (self._folder / KEY_FILE).unlink(missing_ok=True)

    def waiting(self) -> object:
        """The request that waits, or text that says why it cannot be read; None for none."""
        if self._folder is None:
            return None
        try:
            return parse_json(read_bytes(self._folder / REQUEST_FILE, _MOST_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"{self._folder / REQUEST_FILE}: {error}"

    def done(self) -> None:
        """It has been dealt with."""
        if self._folder is not None:
            (self._folder / REQUEST_FILE).unlink(missing_ok=True)

    def pass_on(self, rank: int, request: dict[str, Any]) -> str:
        """Leave a request with another rank of this run; why that is not possible."""
        if self._folder is None:
            return "without a run directory only the rank that is asked can be captured"
        folder = self._folder.parent / f"rank{rank}"
        if not folder.is_dir():
            return f"rank {rank} has no folder in {folder.parent}"
        leave(folder, request)
        return ""


def leave(folder: Path, request: dict[str, Any]) -> None:
    """Put a request into the folder of a rank, whole.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(folder / REQUEST_FILE, json.dumps(request))
