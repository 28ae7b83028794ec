"""The agent's side of one rank: accounting, exports, run directory, end."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from otel_train.agent.messages import (
    LOGGED_VALUES,
    Hello,
    OomKills,
    Opened,
    Report,
    Request,
    Response,
)
from otel_train.agent.rank_end import EXITING_S, LauncherFolder, MappedFile, RankEnd, how_it_ended, maps_file
from otel_train.agent.remote import ANSWER_S, RemoteCaptures, RemoteProviders, RemoteRecording, loop_of
from otel_train.agent.ring_reader import SharedRings
from otel_train.agent.service import AgentService
from otel_train.agent.summary import WindowStart
from otel_train.artifacts.writer import write_at_end_of_run
from otel_train.console.text import TextLayout
from otel_train.datamodel import Capture, system_clock
from otel_train.distributed.hang import OOM_KILL
from otel_train.exporters.manager import ExportManager, SharedExporters
from otel_train.safety import FAULT_SIGNALS, Guard, daemon_thread

if TYPE_CHECKING:
    from otel_train.agent.messages import MessageChannel
    from otel_train.recording.events import LoopState

STALE_S = 3.0
"""A rank that neither answers a request for a report nor records an event for this long hangs with the GIL held: its last
events are read without the report."""

SILENT_S = 30.0
"""Longest wait for a requested report of a rank that records events: its service thread may wait for an import, for example."""

_END_WRITES_S = 0.03
"""Longest total wait for disk writes before the answer to "end"; the rank waits for the remaining writes with "written"."""

_log = logging.getLogger("otel_train")


class RankConnection:
    """Serves one rank: everything except recording.

    Args:
        memory: memory of the rank, or its descriptor.
        process: descriptor of the rank's process; -1 if there is none.
        deliver_s: longest time for delivery after the rank has ended.

    Raises:
        ConfigError: a setting cannot be honoured.
    """

    def __init__(
        self,
        channel: MessageChannel,
        hello: Hello,
        memory: int | memoryview,
        process: int,
        *,
        deliver_s: float,
        shared: SharedExporters,
    ) -> None:
        self.left_s = math.inf  # monotonic time at which the rank disconnected or ended
        self._deliver_s = deliver_s
        self._channel = channel
        self._hello = hello
        self._process = process
        self._window: WindowStart | None = None
        self._ended = threading.Event()
        self._over = False
        self._end = threading.Lock()
        self._state_by_sigterm = self._reported_state = self._reported_cause = ""
        self._ended_ns = 0
        self._assumed = False
        self._asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        config, info = hello.config, hello.info
        self.exporters = ExportManager.make(
            config, info, hello.environ, origins=hello.origins, shared=shared, again=hello.again
        )
        with ExitStack() as undo:  # if `_set_up` fails
            undo.callback(self.exporters.close, 0)
            self._set_up(memory)
            undo.pop_all()

    def _set_up(self, memory: int | memoryview) -> None:
        hello = self._hello
        self._file = MappedFile.of(memory) if isinstance(memory, int) else None
        config, info = hello.config, hello.info
        self.info = self.exporters.info
        self._oom_kills = hello.oom_kills or OomKills(self.info.pid)
        self.rings = SharedRings(memory, self.exporters.flight_path, self.exporters.disk)
        self._launcher = LauncherFolder(hello.environ, info.pid)
        is_agent_process = info.pid != os.getpid()
        if is_agent_process:  # an agent thread cannot report the end of its process, and prints directly
            self._launcher.opened(os.getpid())
            self.exporters.terminal = (TextLayout(*hello.page), partial(self._channel.tell, "say"))
        self._remote = RemoteRecording(self.rings, self._channel.tell)
        self._captures = RemoteCaptures(self._remote, self._channel, self.exporters, config)
        self.service = AgentService(
            hello, recording=self._remote, captures=self._captures, exporters=self.exporters
        )
        self.loop = self.service.loop
        self._written_s = time.monotonic()
        self._written = 0
        self._worker = daemon_thread(self._answer_all, "otel-train-asks")

    def serve(self) -> None:
        """Serves the rank until it has ended and all its data is delivered or in the spool.

        After an error everything is stopped: the rank connects to another agent.
        """
        self._open()
        try:
            self._serve_opened()
        except BaseException:
            _log.exception(
                "agent: an error ended the work for rank %d; another agent is started", self.info.rank
            )
            self._undo()
            raise

    def _undo(self) -> None:
        """Stops the threads and closes the exporters; another agent counts the run on."""
        self._asked.put(None)
        for undo in (self.service.undo, self.rings.close, lambda: self.exporters.close(0)):
            with Guard("close"):
                undo()

    def _serve_opened(self) -> None:
        while not self._ended.is_set():
            others = (self._process,) if self._process >= 0 else ()
            ready = self._channel.wait(1.0, *others)
            if self._channel.fileno() in ready:
                try:
                    self._take(self._channel.receive())
                except EOFError:
                    if not self._records_unconnected():
                        break
                    self._channel.close()
                    self.rings.limit(None)
            elif self._process in ready or (self._channel.fileno() < 0 and not self._records_unconnected()):
                break
            if self._hangs():
                self.rings.limit(None)
        self.left_s, left_ns = time.monotonic(), system_clock()
        if not self._ended.is_set():
            self._finish_without_it(left_ns)
        self._asked.put(None)
        self._worker.join(ANSWER_S)  # it may still send the last answer
        if self._assumed:
            self._correct()
        self._launcher.closed()
        self.exporters.close(self._deliver_s)
        self._channel.close()

    def _records_unconnected(self) -> bool:
        """Returns whether the rank records without a connection: its program has closed the descriptor of the socket."""
        ended = self._reported_state or self.rings.ended_ns
        if self._process < 0 or ended or self._file is None:
            return False
        return maps_file(self.info.pid, self._file)

    def _open(self) -> None:
        """Starts all components and sends the rank their addresses."""
        with ExitStack() as undo:
            undo.callback(self.exporters.close, 0)
            undo.callback(self.service.undo)
            with Guard("captures"):
                self.exporters.answer_captures(self._captures.post)
            self.service.start()
            self._worker.start()
            self._captures.publish()
            undo.pop_all()
        directory = self.exporters.run_directory
        opened = Opened(
            info=self.info,
            run_directory=str(directory) if directory else "",
            metrics_url=self.exporters.metrics_url or "",
            resource=self.service.resource,
        )
        with suppress(OSError):
            self._channel.send(opened)
        self.rings.touch()
        with Guard("captures"):
            self._captures.ask_for_alerts()

    def _hangs(self) -> bool:
        """Returns whether the rank can no longer report, so that its events must be interpreted without a report."""
        now_s, written = time.monotonic(), sum(thread.ring.written for thread in self.rings.threads)
        if written != self._written:
            self._written, self._written_s = written, now_s
        asked_s = self._remote.asked_s
        silent_s = now_s - asked_s if asked_s else 0.0
        return silent_s > SILENT_S or (silent_s > STALE_S and now_s - self._written_s > STALE_S)

    def terminate(self) -> None:
        """Records that the agent got SIGTERM: a rank that is then killed without a known signal counts as terminated as well."""
        self._state_by_sigterm = self._state_by_sigterm or "terminated"

    def _take(self, message: object) -> None:
        if isinstance(message, Report):
            self._remote.take_in(message)
            self.loop.wake()
        elif isinstance(message, Request):
            if message.what == "end":
                self._reported_state, self._ended_ns, assumed, self._reported_cause = message.args
                self._assume(assumed)
            self._asked.put(message)
        elif isinstance(message, Response):
            self._channel.take_response(message)

    def _assume(self, assumed: bool) -> None:  # noqa: FBT001 - a message
        """Records whether the end state is assumed and the kernel can still report another one."""
        self._assumed = assumed and self._process >= 0 and self.info.pid != os.getpid()

    # -- requests of the rank --------------------------------------------------------------------

    def _answer_all(self) -> None:
        while (request := self._asked.get()) is not None:
            try:
                answer = Response(request.number, getattr(self, f"_do_{request.what}")(*request.args))
            except Exception as error:  # noqa: BLE001 - said to the rank
                answer = Response(request.number, None, f"{type(error).__name__}: {error}")
                _log.warning(
                    "agent: an error in the request %r; it is not answered", request.what, exc_info=error
                )
            if request.what == "written":  # before the answer, after which the rank closes the connection
                self._ended.set()
            self._channel.respond(answer)

    def _do_summary(self, state: str) -> dict[str, Any]:
        with self.loop.up_to_date():
            return self.service.document(state, self._window)

    def _do_reset_window(self) -> None:
        with self.loop.up_to_date():
            self.service.tracking.reset()
            self._window = WindowStart.now(self.service)

    def _do_instrumentation_gaps(self) -> list[dict[str, str]]:
        return self.service.instrumentation_gaps()

    def _do_account(self) -> LoopState:
        with self.loop.up_to_date():
            return loop_of(self.service.run, self.rings)

    def _do_number(self, at_ns: int) -> int:
        return self.service.run.recent.at(at_ns, self.service.run.step_number)

    def _do_epoch(self, at_ns: int) -> int:
        with self.loop.lock:
            return self.service.run.epochs.at(at_ns)

    def _do_captured(self, capture: Capture) -> None:
        with self.loop.lock:
            self.service.run.captured(capture)

    def _do_active(self, active: bool) -> None:  # noqa: FBT001 - a message
        self.service.run.captures.active = active

    def _do_hand_over(self) -> None:
        with self.loop.up_to_date(self._hello.config.exit_timeout_s / 2) as done:
            if done:
                self.service.tracking.hand_over()

    def _do_request_done(self) -> None:
        self._captures.request_done()

    def _do_pass_on(self, ranks: list[int], request: dict[str, Any]) -> str:
        return self._captures.folder.pass_on(ranks, request)

    def _do_providers(self) -> None:
        with self.loop.lock:
            self.exporters.add_elsewhere(RemoteProviders(self._remote))

    def _do_close_run(self) -> None:
        """Accounts the run to its end after recording has stopped, so that the last steps get their numbers."""
        self.loop.stop(self._hello.config.exit_timeout_s)
        with self.loop.lock:
            self.loop.read_rings()
            self.service.run.close(self.rings.ended_ns or system_clock())

    def _do_end(self, state: str, *_: object) -> bool:
        """Accounts and exports the run to its end. Waits at most ``_END_WRITES_S`` for the disk."""
        self.exporters.disk.limit_waits(_END_WRITES_S)
        self._finish(state)
        return True

    def _do_written(self) -> bool:
        """Waits for the disk after the end; returns whether everything was written."""
        return self.exporters.disk.written(self._deliver_s)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, state: str, *, cause: str = "") -> None:
        with self._end:
            if self._over:
                return
            self._over = True
            service, config, disk = self.service, self._hello.config, self.exporters.disk
            service.end_cause = cause or self._reported_cause
            disk.keep_all()
            with Guard("close"):
                self.loop.stop(config.exit_timeout_s)
                service.last_poll(state, cause=cause, ended_ns=self._ended_ns)
            with Guard("close"):
                service.close()
            with Guard("flight file"):
                self.rings.close()
            run = self.exporters.run_directory
            disk.do(Guard("artifacts"), lambda: write_at_end_of_run(config, self.info.rank, run))
            disk.do(Guard("captures"), self._captures.folder.withdraw)
            if not self._assumed:
                self._close_files()
            with Guard("close"):  # a rank whose wait has timed out reads it later
                self._channel.tell(
                    "ended", service.document(state, self._window), service.instrumentation_gaps()
                )

    def _close_files(self) -> None:
        """Releases the run directory before delivery ends: the next start of this rank must not wait for a Collector."""
        with Guard("run directory"):
            self.exporters.close_files()

    def _correct(self) -> None:
        """Replaces an assumed end state when the kernel reports another exit code, or a crash."""
        state, cause = how_it_ended(self.info.pid, self._process, EXITING_S)
        with Guard("close"):
            if state == "failed" or cause in FAULT_SIGNALS:
                self.service.correct(state, cause)
        self._close_files()

    def _finish_without_it(self, left_ns: int) -> None:
        """Finishes the run of a rank that died or disconnected at ``left_ns``, which may be long ago on a busy node."""
        if self._reported_state:  # the rank sent its end state and did not wait for the answer
            self._finish(self._reported_state)
            return
        self._ended_ns = self.rings.ended_ns
        state, cause = how_it_ended(self.info.pid, self._process)
        has_recorded_end = self._ended_ns and cause in ("", "exec")  # in shared memory
        if has_recorded_end:
            (state, assumed), cause = self.rings.end_state, ""
            self._assume(assumed)
        elif state == "killed" and not cause and self.rings.ended_by:
            state, cause = "terminated", self.rings.ended_by
        elif state == "killed" and not cause and self._state_by_sigterm:
            state = self._state_by_sigterm
        elif state == "killed" and cause in ("", "SIGKILL") and self._oom_kills.count:
            cause = OOM_KILL
        self.rings.limit(None)
        with Guard(LOGGED_VALUES):
            self._remote.take_in_unreported()
        self._ended_ns = self._ended_ns or left_ns
        self._finish(state, cause=cause)
        self.exporters.disk.written(self._deliver_s)  # the launcher reads the run directory next
        steps = self.service.run.totals.steps_by_phase().get("train", 0)
        path = self.exporters.rank_folder
        if path is not None and not has_recorded_end:
            self._launcher.ended(RankEnd(path, self.info.rank, steps, self.service.lost))
