"""A fake driver in C, for readers of events that do without the interpreter: see ``fake_cuda.c``."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from otel_train.instrumentation.accelerator import DeviceDriver, NativeDriver
from otel_train.recording.ring_buffer import EXTENSION

CONTEXT = 7
_FUNCTIONS = (
    "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuEventQuery", "cuEventElapsedTime",
    "cuEventRecord",
)  # fmt: skip


_OF_HIP = {
    "cuCtxSetCurrent": "hipSetDevice",
    "cuThreadExchangeStreamCaptureMode": "hipThreadExchangeStreamCaptureMode",
    **{f"cuEvent{what}": f"hipEvent{what}" for what in ("Query", "ElapsedTime", "Record")},
}


def compiled(folder: Path, *, hip: bool = False) -> Path:
    """The library, or a skip where it cannot be had; ``hip``: with the names of AMD's functions."""
    compiler = shutil.which("cc")
    if compiler is None or EXTENSION is None:
        pytest.skip("needs a C compiler, for a fake driver, and the extension in C, which reads from it")
    library = folder / "libfakecuda.so"
    source = Path(__file__).with_suffix(".c")
    names = [f"-D{cuda}={other}" for cuda, other in _OF_HIP.items()] if hip else []
    command = [compiler, "-shared", "-fPIC", "-O1", *names, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class FakeCuda(DeviceDriver):
    """One device, which works through a queue.

    Args:
        library: path of the compiled ``fake_cuda.c``.
        native: events can be read without Python.
    """

    def __init__(self, library: Path | str, *, native: bool = True) -> None:
        super().__init__("meta")
        self.library = ctypes.CDLL(str(library))
        self.holding = ctypes.PyDLL(str(library))
        """The same, called with the interpreter lock held."""
        self.library.set_now.argtypes = [ctypes.c_int64]
        self.holding.hold.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.library.context_of_reader.restype = ctypes.c_void_p
        self.now_ns = self.done_ns = 0
        self.made: list[ctypes.c_int64] = []
        self._native = native
        self.library.set_now(0)

    def work(self, ns: int) -> None:
        """Queue a kernel."""
        self.done_ns = max(self.now_ns, self.done_ns) + ns

    def go_on(self, ns: int) -> None:
        """Let so much time pass for the device."""
        self.now_ns += ns
        self.library.set_now(self.now_ns)

    def devices(self) -> tuple[int, ...]:
        return (0,)

    def new_event(self, device: int) -> ctypes.c_int64:
        self.made.append(ctypes.c_int64(0))
        return self.made[-1]

    def spare(self, device: int) -> list[ctypes.c_int64]:
        return []

    def recorder(self, device: int) -> Callable[[ctypes.c_int64], None]:
        def record(event: ctypes.c_int64) -> None:
            event.value = max(self.now_ns, self.done_ns)

        return record

    def stamp(self, device: int) -> None:
        return

    def native(self, device: int) -> NativeDriver | None:
        if not self._native:
            return None
        stamp = self.new_event(device)
        functions = [ctypes.c_void_p.from_buffer(self.library[name]).value or 0 for name in _FUNCTIONS]
        return NativeDriver((*functions, CONTEXT, ctypes.addressof(stamp), 1), ctypes.addressof)

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        return lambda: float(tensor)

    @contextmanager
    def reading(self, device: int) -> Iterator[None]:
        yield

    def query(self, event: ctypes.c_int64) -> bool:
        return event.value <= self.now_ns

    def elapsed_ns(self, begin: ctypes.c_int64, end: ctypes.c_int64) -> int:
        return end.value - begin.value

    def synchronize(self, device: int) -> None:
        return
