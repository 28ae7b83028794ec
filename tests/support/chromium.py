"""A real browser without a window, driven over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-background-networking",
    "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_AS_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from one descriptor and writes to another, and these are their numbers."""

_CODES = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9, "Enter": 13, "Escape": 27}


class Chromium:
    """One page of it, by the DevTools protocol.

    Args:
        profile: an empty folder for what it keeps.
        size: of the window, in pixels.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1200, 900)) -> None:
        assert CHROMIUM is not None
        read, its_write = os.pipe()
        its_read, write = os.pipe()
        flags = (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "about:blank")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, str(its_read), str(its_write), CHROMIUM, *flags],
            pass_fds=(its_read, its_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(its_read)
        os.close(its_write)
        self._from, self._to = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number = 0
        self._session = ""
        self.faults: list[str] = []
        [page] = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        answer = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something, and wait for the answer. What the page complains of meanwhile is kept in ``faults``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address: str, until: str = "true") -> None:
        """Go to an address, and wait for its scripts, and until something is true."""
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && ({until})")

    def wait(self, expression: str, limit_s: float = 60.0) -> Any:
        """The value of an expression as soon as it is true."""
        return until(lambda: self.ask(expression), expression, limit_s)

    def press(self, key: str) -> None:
        """A key, as a keyboard sends it."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": _CODES[key]}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **pressed)

    def write(self, text: str) -> None:
        """Text, into what has the focus."""
        self.call("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        """Be one that prefers ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """A screenshot."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End it."""
        self._to.close()
        self._process.terminate()
        self._process.wait(30)
        self._from.close()

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while byte := self._from.read(1):
            if byte == b"\0":
                answer: dict[str, Any] = json.loads(data)
                return answer
            data += byte
        raise AssertionError("the browser is gone")

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.faults.append(str(message["params"]["entry"]["text"]))
