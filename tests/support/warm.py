"""Programs that begin as forks of an interpreter that has imported torch: the import takes ten times as long as most of them."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from tests.support.programs import environ

_PROGRAM = "exec(__import__('tests.support.warm', fromlist=['warm']).program(int(__import__('sys').argv[1])))"
_ADOPTS = 36  # PR_SET_CHILD_SUBREAPER


class WarmProgram(subprocess.Popen[str]):
    """``Popen`` of ``[sys.executable, program, *arguments]`` in text mode: a child of this process, which ends as any other.

    It is not for what a program does before it imports torch, nor for what it has in ``sys.modules``.
    """

    def _execute_child(self, *given: Any) -> None:  # of CPython 3.10 to 3.13
        if sys.platform != "linux":
            super()._execute_child(*given)
            return
        command, folder, variables, pipes = given[0], given[5], given[6], given[10:16]
        wanted = {
            "words": command[1:], "folder": str(folder or Path.cwd()), "environ": variables, "parent": os.getpid(), "session": given[21],
        }  # fmt: skip
        ends = enumerate((pipes[0], pipes[3], pipes[5]))
        waits, key = os.pipe()
        files = [*(standard if end < 0 else end for standard, end in ends), waits]
        begins, _ = _interpreter()
        adopts = functools.partial(ctypes.CDLL(None).prctl, _ADOPTS)
        adopts(1, 0, 0, 0)
        try:
            socket.send_fds(begins, [json.dumps(wanted).encode()], files)
            self.pid = int(begins.recv(32))
        finally:
            adopts(0, 0, 0, 0)  # what the program starts may be an orphan
            os.close(waits)
            os.close(key)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # the program's ends


def ended(
    command: list[str], variables: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of such a program, with what it printed."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with WarmProgram(command, env=variables, cwd=folder, **pipes) as process:
        try:
            said, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


@functools.cache
def _interpreter() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The one that forks, and a connection to it. It ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
    forks = subprocess.Popen(command, env=environ(), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, forks


def program(number: int) -> CodeType:
    """Runs in the interpreter that forks. In each fork it returns: the code of a program, which takes the place of this one."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # at exit it complains of objects that are frozen
    importlib.import_module("torch._dynamo")  # an optimizer needs it
    begins = socket.socket(fileno=number)
    gc.freeze()  # to free what torch has made takes longer than most programs
    while True:
        text, files, *_ = socket.recv_fds(begins, 1 << 20, 4)
        if not text:
            os._exit(0)
        if os.fork():
            os.wait()
        elif os.fork():
            os._exit(0)  # the program becomes a child of the process that wants it
        else:
            return _begun(json.loads(text), files, begins)
        for file in files:
            os.close(file)


def _begun(wanted: dict[str, Any], files: list[int], begins: socket.socket) -> CodeType:
    """Make this process what it would be if it had just been started."""
    while os.getppid() != wanted["parent"]:
        os.sched_yield()
    if wanted["session"]:
        os.setsid()
    *standards, waits = files
    for standard, file in enumerate(standards):
        os.dup2(file, standard)
    begins.send(str(os.getpid()).encode())
    begins.close()
    os.read(waits, 1)  # until it is closed
    for file in files:
        os.close(file)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    words = wanted["words"]
    sys.argv[:], sys.orig_argv[1:], sys.path[0] = words, words, str(Path(words[0]).parent)
    sys.modules["__main__"].__dict__["__file__"] = words[0]
    return compile(Path(words[0]).read_text(encoding="utf-8"), words[0], "exec")
