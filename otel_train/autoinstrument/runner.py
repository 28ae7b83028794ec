"""Runs a program as a child process, forwards signals, and ends with its exit code or signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from otel_train.agent.messages import FOLDER
from otel_train.config.settings import settings_in
from otel_train.config.sources import resolve
from otel_train.config.validation import FILE_VARIABLE
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_settings import OtlpSettings
from otel_train.files import absolute
from otel_train.resource import LAUNCH_RUN, detect

SITE: Final = Path(__file__).parent / "site"
"""Folder that is put on PYTHONPATH; it has ``sitecustomize.py``."""

_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_IGNORES_PYTHONPATH = frozenset("IES")
"""Options of Python that prevent the import of ``sitecustomize`` from PYTHONPATH."""

_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*t?")
_PYTHON = re.compile(rb"#!.*\bpython[0-9.]*\b")


def interpreter_flags(words: Sequence[str]) -> list[str]:
    """Returns the options in a command line of Python that stand before the script, ``-m`` or ``-c``, such as ``-X dev``."""
    flags: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_A_VALUE:
            flags += [word, next(rest, "")]
        elif word[:2] in ("-X", "-W") or word.startswith("--"):
            flags.append(word)
        elif word[:1] != "-" or word == "-":
            break
        else:
            cluster = re.split("[mc]", word, maxsplit=1)  # -um is -u -m
            if cluster[0] != "-":
                flags.append(cluster[0])
            if len(cluster) > 1:
                break
    return flags


def command_line(words: Sequence[str], *, module: str = "", flags: Sequence[str] = ()) -> list[str]:
    """Returns the command that runs a script or a command with its arguments, or ``module`` with ``words`` as arguments."""
    if module:
        return [sys.executable, *flags, "-m", module, *words]
    if not words:
        raise ConfigError("nothing to run: expected a script, a command, or -m and a module")
    path = Path(words[0])
    if path.is_dir() or (path.is_file() and _is_python(path)):
        return [sys.executable, *flags, *words]
    if shutil.which(words[0]) is None:
        remedy = "A script is given by its path, a module after -m"
        raise ConfigError(f"{words[0]}: no such file, and no such command. {remedy}")
    return list(words)


def _is_python(path: Path) -> bool:
    """Returns whether to run a file with ``python path``: by its suffix, its ``#!`` line, or because it is not executable."""
    if path.suffix in (".py", ".pyw", ".pyc", ".pyz", ".zip") or not os.access(path, os.X_OK):
        return True
    with path.open("rb") as file:
        return _PYTHON.match(file.readline(256)) is not None


def unreachable(line: Sequence[str]) -> str:
    """Returns the interpreter option in a command that prevents instrumentation; "" if there is none."""
    if line[0] != sys.executable and not _INTERPRETER.fullmatch(Path(line[0]).name):
        return ""
    clusters = [flag for flag in interpreter_flags(line) if flag[:2] not in ("--", "-X", "-W")]
    letters = (letter for cluster in clusters if cluster[0] == "-" for letter in cluster[1:])
    return next((f"-{letter}" for letter in letters if letter in _IGNORES_PYTHONPATH), "")


def environment(environ: Mapping[str, str], settings: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns the environment of the program: the user's, the settings given as options, and the import hook.

    An invalid option raises ``ConfigError``; an invalid variable of the user is ignored with a warning.
    """
    _refuse_wrong(settings, environ)
    result = {**environ, **settings}
    config = resolve(environ=result).config
    if config.disabled:
        return result
    if result.get(FILE_VARIABLE):
        result[FILE_VARIABLE] = str(absolute(Path(result[FILE_VARIABLE])))
    # Absolute, because the program may change its working directory.
    result["OTEL_TRAIN_RUN_DIR"] = str(absolute(Path(config.run_dir)))
    result[FOLDER] = str(folder)
    result[LAUNCH_RUN] = detect(config, environ).run_id
    result["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [environ.get("PYTHONPATH")])])
    return result


def _refuse_wrong(settings: Mapping[str, str], environ: Mapping[str, str]) -> None:
    for wrong in settings_in(settings)[1]:
        raise ConfigError(wrong.problem)
    if path := settings.get(FILE_VARIABLE):
        resolve(config_file=path, environ={})

    def refuse(variable: str, problem: str, _: str) -> None:
        if variable in settings:
            raise ConfigError(problem)

    OtlpSettings.read({**environ, **settings}, on_wrong=refuse)


_FORWARDED = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH,
)  # fmt: skip
_SENT_BY_A_PROCESS = 0
"""``si_code`` of 0 or less: a process sent the signal (siginfo_t, sigaction(2)). A terminal sends its signals to the program
as well: forwarded, they would arrive twice."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


def start_and_wait(
    command: Sequence[str], environ: Mapping[str, str], before_reaping: Callable[[], None] = lambda: None
) -> int:
    """Runs a command with the terminal, standard streams, files, process group and signals of this process.

    Returns its exit code; -n if signal n killed it, as in ``subprocess``. Signals from other processes are forwarded; those of
    the terminal reach the command directly. ``before_reaping`` is called after the exit, while the child is a zombie: its
    status is still in ``/proc``.
    """
    ignored = {number for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN}  # nohup
    waited = {signal.SIGCHLD, *_FORWARDED} - ignored
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        child = subprocess.Popen(  # noqa: S603 - it is what the user asks for
            command,
            env=dict(environ),
            close_fds=False,
            preexec_fn=_in_the_child(before),  # noqa: PLW1509 - no thread runs here
        )
        _wait(child, waited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(KeyboardInterrupt):
        before_reaping()
    return child.wait()


def _wait(child: subprocess.Popen[bytes], waited: set[signal.Signals]) -> None:
    """Waits until the child has exited, without reaping it, and forwards signals."""
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        info = signal.sigwaitinfo(waited)
        if info.si_signo != signal.SIGCHLD and info.si_code <= _SENT_BY_A_PROCESS:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(info.si_signo)


def _in_the_child(mask: set[int]) -> Callable[[], None]:
    """Returns the ``preexec_fn`` of the child: it sets the parent-death signal and restores the signal mask."""
    end_too = end_with_parent()

    def prepare() -> None:
        end_too()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def end_with_parent() -> Callable[[], None]:
    """Returns a ``preexec_fn`` after which the kernel kills the child when this process ends."""
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def end_like(code: int) -> int:
    """Ends this process with the signal that killed the program; if none did, returns the exit code."""
    if code >= 0:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    core = resource.RLIMIT_CORE
    resource.setrlimit(core, (0, resource.getrlimit(core)[1]))  # no second core file
    number = -code
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
