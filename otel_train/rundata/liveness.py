"""Determines whether a rank is live, from the heartbeat in its flight file or the age of its summary."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from otel_train.config.deprecated import present
from otel_train.config.settings import Config
from otel_train.errors import ConfigError
from otel_train.exit_hook import ENDS
from otel_train.resource import namespace_of, process_mark
from otel_train.rundata.files import mapping, number, whole

if TYPE_CHECKING:
    from otel_train.recording.flight_recorder import Heartbeat

QUIET_S = 15.0
"""Least age in seconds at which a heartbeat is out of date: the agent polls twice a second, and a busy machine delays it less."""

_MISSED_POLLS = 10
"""Least number of missed polls after which it is out of date, where ``poll_interval_s`` of the setting ``tuning`` is long."""

_SEVERITIES = {
    "killed": "critical", "failed": "critical", "gone": "critical", "stalled": "critical", "silent": "warning",
    "running": "live", "terminated": "warning", "interrupted": "warning", "finished": "ok", "unknown": "info",
}  # fmt: skip
"""Severity by state, the worst state first."""


class Liveness(NamedTuple):
    """Whether a run is live, and how it ended.

    Attributes:
        word: finished, failed, interrupted, terminated, killed; running, stalled, silent, gone or unknown.
        quiet_s: without a recorded end, seconds since the last heartbeat or summary; if stalled, since the last progress.
    """

    word: str
    quiet_s: float | None = None

    @property
    def severity(self) -> str:
        """Severity of the state: ok, live, info, warning or critical."""
        return _SEVERITIES[self.word]

    @property
    def running(self) -> bool:
        """Whether the process is known to run; it may be stalled."""
        return self.word in {"running", "stalled"}

    @property
    def live(self) -> bool:
        """Whether further data may follow."""
        return self.running or self.word in {"silent", "unknown"}


def state_of_run(states: Iterable[Liveness]) -> Liveness:
    """Returns the state of a run: the worst state of its ranks; ``unknown`` only if all ranks are."""
    return min(states, key=lambda state: [*_SEVERITIES].index(state.word))


def liveness(
    summary: Mapping[str, Any],
    about: Mapping[str, Any],
    heartbeat: Heartbeat | None,
    *,
    written_s: float | None,
    now_s: float,
) -> Liveness:
    """Determines whether the process of a rank is live.

    Args:
        summary: ``summary.json`` of the rank; empty if there is none.
        about: ``run.json``; empty if there is none. Its ``pid`` is that of this rank, or missing.
        heartbeat: heartbeat in the flight file; without one, the age of the summary is used.
        written_s: Unix time at which the summary was written; None if there is none.
        now_s: Unix time.
    """
    state = summary.get("state")
    if state in (*ENDS, "killed") and not _began_again(summary, heartbeat):
        return Liveness(str(state))
    poll_s, summary_s = _intervals(about.get("settings"))
    if heartbeat is not None:
        quiet_s, patience_s = now_s - heartbeat.unix_s, max(QUIET_S, _MISSED_POLLS * poll_s)
    elif written_s is not None:
        quiet_s, patience_s = now_s - written_s, 3 * summary_s
    else:  # the agent has written nothing yet, or could not start
        pid, known = about.get("pid"), {"host": about.get("host")}
        return Liveness("gone" if isinstance(pid, int) and is_alive(pid, known) is False else "unknown")
    # After the clock was set back, an old heartbeat is in the future: then the process must exist, too.
    is_recent = quiet_s <= patience_s and not (quiet_s < -patience_s and _is_gone(summary, about, heartbeat))
    if is_recent:
        stalled_s, until_s = number(mapping(summary.get("stall")).get("seconds")), written_until(summary)
        if stalled_s is not None and until_s is not None:
            return Liveness("stalled", stalled_s + max(0.0, now_s - until_s))
        return Liveness("running", max(0.0, quiet_s))
    if not summary and written_s is not None:  # the summary cannot be read, and may have an end state
        return Liveness("unknown", quiet_s)
    return Liveness("gone" if _is_gone(summary, about, heartbeat) else "silent", max(0.0, quiet_s))


def _is_gone(summary: Mapping[str, Any], about: Mapping[str, Any], heartbeat: Heartbeat | None) -> bool:
    """Returns whether the process of a rank is known to have ended."""
    pid, known = (heartbeat.pid, heartbeat.identity) if heartbeat else (summary.get("pid"), {})
    known = {"host": summary.get("host") or about.get("host"), **known}
    return isinstance(pid, int) and is_alive(pid, known) is False


def _began_again(summary: Mapping[str, Any], heartbeat: Heartbeat | None) -> bool:
    """Returns whether the summary is of the previous attempt: it stays until the new attempt writes its own."""
    if heartbeat is None:
        return False
    pid = summary.get("pid")
    if isinstance(pid, int) and pid != heartbeat.pid:  # in containers the pids may be equal
        return True
    before, attempt = whole(summary.get("attempt")), whole(heartbeat.identity.get("attempt"))
    if before is not None and attempt is not None:
        return before != attempt
    written_s = written_until(summary)  # the last heartbeat may follow it late: the disk may be slow
    return written_s is not None and heartbeat.unix_s > written_s + QUIET_S


def written_until(summary: Mapping[str, Any]) -> float | None:
    """Returns the Unix time up to which a summary counts; None if it does not have it."""
    if (until_s := number(summary.get("until_unix_s"))) is not None:
        return until_s
    started_s, wall_s = number(summary.get("started_unix_s")), number(summary.get("wall_seconds"))
    return None if started_s is None or wall_s is None else number(started_s + wall_s)


def _intervals(settings: object) -> tuple[float, float]:
    given, _ = present(mapping(settings))
    try:
        tuned = Config(tuning=given.get("tuning", "")).tuned()
    except ConfigError:  # run.json is untrusted
        tuned = Config().tuned()
    return tuned.poll_interval_s, tuned.summary_interval_s


def is_alive(pid: int, identity: Mapping[str, Any]) -> bool | None:
    """Returns whether the process of a rank runs; None if it ran on another host, or in another container.

    A later process with the same pid is recognised by its ``process_mark``.
    """
    node, space = os.uname().nodename, namespace_of("pid")
    if (identity.get("host") or node) != node or (identity.get("pid_namespace") or space) != space:
        return None
    return is_running(pid) and (identity.get("process") or "") in ("", process_mark(pid))


def is_running(pid: int) -> bool:
    """Returns whether a process of this host exists and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
