"""The parent of a program: stands aside, passes signals on, and ends as the program ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PASSED_ON = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH,
)  # fmt: skip
_SENT_BY_A_PROCESS = 0
"""``si_code`` up to 0: a process has sent the signal (siginfo_t, sigaction(2)). A terminal sends it to the
program as well, so passing it on would send it twice."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
        pid: its process.
        code: exit code; -n: killed by signal n, as ``subprocess`` says it.
    """

    pid: int
    code: int

    @property
    def signal_name(self) -> str:
        """Name of the signal that killed it; "" if none did."""
        if self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # real-time signals have no names
            return f"signal {-self.code}"


def start_and_wait(
    command: Sequence[str], environ: Mapping[str, str], before_reaping: Callable[[], None] = lambda: None
) -> Ended:
    """Run a command as if nobody stood between: same terminal, standard streams, files, group, signals.

    Signals that a process sends to us are passed on; those of the terminal reach the command by themselves.

    Args:
        command: what to run.
        environ: its environment.
        before_reaping: called when it has ended, and the kernel still tells everybody how.

    Raises:
        OSError: it cannot be started.
    """
    ignored = {number for number in _PASSED_ON if signal.getsignal(number) is signal.SIG_IGN}  # nohup
    waited = {signal.SIGCHLD, *_PASSED_ON} - ignored
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
    with contextlib.suppress(KeyboardInterrupt):  # nobody wants to wait for more
        before_reaping()
    return Ended(child.pid, child.wait())


def _wait(child: subprocess.Popen[bytes], waited: set[signal.Signals]) -> None:
    """Wait until it has ended, without taking its status away."""
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        info = signal.sigwaitinfo(waited)
        if info.si_signo != signal.SIGCHLD and info.si_code <= _SENT_BY_A_PROCESS:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(info.si_signo)


def _in_the_child(mask: set[int]) -> Callable[[], None]:
    """What the child does before it becomes the program."""
    library = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def end_like(ended: Ended) -> int:
    """Die by the signal that killed the program, so that who started us sees the same; else its exit code."""
    if ended.code >= 0:
        return ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # one core is enough
    number = -ended.code
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
