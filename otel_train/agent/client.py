"""The training process's side of the agent: starts the agent, sends reports, executes requests, waits for the agent at the end."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.agent.lazy_components import LazyComponents
from otel_train.agent.messages import CAPTURES_OFF, Hello, OomKills, Opened, Request, Response, ResponseBox
from otel_train.agent.process import BUSY_S, AgentConnection, start_of_job
from otel_train.agent.reports import PAUSE_S, ReportBuilder
from otel_train.config.settings import CODE, Config
from otel_train.console import print_while_taken, terminal_of
from otel_train.datamodel import Anchor, ExportBatch, system_clock
from otel_train.errors import ConfigError
from otel_train.exit_hook import ENDS, ExitHook, cause_of
from otel_train.instrumentation.logged_values import CacheSizes
from otel_train.instrumentation.manager import InstrumentationManager
from otel_train.recording.descriptors import require_descriptors
from otel_train.resource import Process, detect, find_job, torch_versions
from otel_train.safety import DaemonThread, Guard, frames, free_in_forks

if TYPE_CHECKING:
    from otel_train.agent.captures import RankCaptures
    from otel_train.distributed.store import ExchangeRequest
    from otel_train.recording.events import LoopState
    from otel_train.trackers.manager import Trackers
    from otel_train.trackers.metrics import FlatRow

WRITING_S = 0.1
"""Longest wait of ``AgentClient.close`` for an agent that does not answer and that outlives this process."""

END_S = 0.08
"""Longest duration of ``close`` with an agent that outlives this process if its disk hangs: 0.1 s less the exit of the interpreter."""

LEAST_WRITING_S = 0.02
"""Shortest wait of ``close`` for the disk, even if the steps before have used up ``END_S``."""

OPEN_S = 10.0
"""Longest wait of a call that needs the run directory for the agent to open it."""

SILENT_S = 30.0
"""A rank logs once that its agent has not begun, after so many seconds without a message of it."""

ANSWER_S = 10.0
"""Longest wait for an answer of the agent, such as a summary."""

TURN_S = 0.01
"""Interval at which the service thread checks whether the report of another thread has been sent."""

_COMPONENT_OF = {
    "say": "console", "log": "console", "rows": "trackers", "batch": "your providers", "exchange": "ranks",
    "exchange_request": "ranks", "loop": "captures", "post": "captures", "alert": "captures", "request": "captures",
}  # fmt: skip
"""Component that a request of the agent concerns, in whose guard it is handled."""

_log = logging.getLogger("otel_train")
_services: weakref.WeakSet[AgentClient] = weakref.WeakSet()


class State(IntEnum):
    """State of a session. It only increases."""

    RUNNING = 0
    """An agent starts or works, or is being replaced."""
    ENDING = 1
    """The agent has been asked to account the run to its end."""
    ENDED = 2
    """No further request is sent. The final summary may still arrive."""
    ABANDONED = 3
    """There is no agent, and none will be started."""


class AgentClient:
    """The training process's side of a session: the service thread, and requests to the agent.

    The service thread sleeps until the agent sends a request, or for ``ReportBuilder.pause_s``. No other thread of the
    program waits for the agent, except in calls that need its answer, such as ``summary()``, and at the end of the session.

    Attributes:
        recording: the instrumentation, and the memory that it writes to.
        connection: connection to the agent.
        components: captures, trackers, providers and the exchange between ranks.
        opened: the agent's answer to ``Hello``; None before.
        info: identity of the run and the rank; run and attempt are final once the agent has opened the run directory.
        when_needed_at_end: called with whether the session must be closed before SIGTERM ends the process.

    Raises:
        ConfigError: a setting cannot be honoured.
        OSError: no agent can be started, or too few descriptors are left.
        RuntimeError: no thread can be started.
    """

    when_needed_at_end: Callable[[bool], None] = staticmethod(lambda _: None)
    _send_s = 0.0

    def __init__(
        self, config: Config, environ: Mapping[str, str], *, origins: Mapping[str, str], anchor: Anchor
    ) -> None:
        self._config = config
        self._environ = dict(environ)
        self._origins = origins if isinstance(origins, dict) else dict(origins)  # keeps `Origins.ignored`
        self._anchor = anchor
        require_descriptors(above=config.agent == "process")
        self.info = detect(config, environ, process=Process(start=start_of_job))
        self.caches = CacheSizes()
        self.recording = InstrumentationManager(
            config, self.info, anchor=anchor, environ=environ, job=find_job
        )
        self.components = LazyComponents(self, config, anchor)
        self._reports = ReportBuilder(self.recording, self.components, self.caches, self.info.world_size)
        self._reporting = free_in_forks(threading.RLock())
        self._report_is_requested = False
        self._state = State.RUNNING
        self.opened: Opened | None = None
        self._is_opened = threading.Event()  # also set if no agent will open the run directory
        self._refusal, self._opens_unawaited, self._interrupted = "", False, False
        self._silence_logged = self._agent_has_ended = False
        self._final: tuple[dict[str, Any], list[dict[str, str]]] | None = None
        self._end_guard = Guard("trackers")
        try:
            self._check_settings()
            self.connection = AgentConnection(config, self._environ, self.info, self.recording.memory)
        except BaseException:
            self.recording.end()
            self.recording.close()
            raise
        self._thread = DaemonThread(target=self._serve, name="otel-train-service", daemon=True)
        _services.add(self)

    def start(self) -> None:
        """Starts recording and reporting.

        Raises:
            ConfigError: an agent in a thread cannot honour a setting. An agent process logs it instead.
            OSError: the agent cannot be reached.
            RuntimeError: no thread can be started.
        """
        greeted = False
        try:
            self.components.preload(self.info.world_size)
            self._update_end_work()
            self.recording.begin()
            if self._config.profiler != "off":
                self.components.signal.install()
            self.connection.send_first_hello(self._hello())  # must be the first message
            greeted = True
            self._thread.start()
            self._await_opening()
        except BaseException as error:
            state, ended_ns = ExitHook.of(error), system_clock()
            with Guard("close"):
                self._record_end(state, ended_ns)
            if greeted:
                self.tell("end", state, ended_ns, False, cause_of(error) if state == "failed" else "")
            self._advance_state(State.ABANDONED)
            self.components.signal.remove()
            self.recording.end()
            self.connection.channel.close()
            for thread in (self._thread, self.connection.thread):
                if thread is not None and thread.is_alive():
                    thread.join(self._config.exit_timeout_s)
            self.recording.close()
            raise

    def _await_opening(self) -> None:
        """Waits for an agent in a thread to open the run directory; raises its error if it cannot."""
        if self.connection.thread is None:
            return
        self._opens_unawaited = _is_finding_module()
        if self._opens_unawaited:  # this thread holds the import lock, which the agent's thread needs
            return
        self._is_opened.wait(OPEN_S)
        if self._refusal:
            raise ConfigError(self._refusal)
        if self.opened is None:
            raise RuntimeError(self.connection.thread.problem or "the agent did not begin")

    def _check_settings(self) -> None:
        """Rejects settings that the agent could only reject later."""
        config = self._config
        in_code = self._origins.get("exporters", CODE) == CODE
        if in_code and config.exporters.strip() not in ("auto", "off"):
            from otel_train.exporters.plugins import check_known

            check_known(config.exporters)

    def _advance_state(self, state: State) -> None:
        self._state = max(self._state, state)

    @property
    def _is_ending(self) -> bool:
        return self._state >= State.ENDING

    @property
    def _is_over(self) -> bool:
        return self._state >= State.ENDED

    # -- calls of the session --------------------------------------------------------------------

    @property
    def run_directory(self) -> Path | None:
        """Folder of this run; None if it cannot be written. Waits for the agent to open it."""
        opened = self._open()
        return Path(opened.run_directory) if opened is not None and opened.run_directory else None

    @property
    def metrics_url(self) -> str | None:
        """Address of ``/metrics``; None if it is not served. Waits for the agent to open it."""
        opened = self._open()
        return (opened.metrics_url or None) if opened is not None else None

    def track(self, given: Mapping[str, Any]) -> None:
        """See ``Session.track``."""
        trackers = self._trackers() if given else None
        if trackers is not None:
            trackers.attach(given)
            self._update_end_work()

    def provide(self, providers: Mapping[str, Any]) -> None:
        """See ``Session.provide``."""
        if all(provider is None for provider in providers.values()):
            return
        opened = self._open()
        if opened is None:
            return
        self.components.provide(opened, providers)
        self._update_end_work()
        self.ask("providers")

    def show_blocks(self, blocks: frozenset[str]) -> None:
        """See ``Session.show_blocks``."""
        trackers = self._trackers()
        if trackers is not None:
            trackers.show(blocks)
        capturing = self.components.captures.set_up() if "profiler" in blocks else None
        if capturing is not None:
            capturing.show_block()

    @property
    def captures(self) -> RankCaptures:
        """Captures of this rank. Waits for the agent to open the run directory."""
        self._open()
        return self.components.captures

    def summary(self, state: str) -> dict[str, Any]:
        """Returns the summary since the start or ``reset_window``; after the end, the final one; empty if no agent answers."""
        return self._final_answer()[0] if self._is_ending else self._ask_fresh("summary", state) or {}

    def reset_window(self) -> None:
        """Lets ``summary`` start from now."""
        if not self._is_ending:
            self._ask_fresh("reset_window")

    def instrumentation_gaps(self) -> list[dict[str, str]]:
        """Returns what could not be instrumented, with the reason."""
        return self._final_answer()[1] if self._is_ending else self._ask_fresh("instrumentation_gaps") or []

    def _trackers(self) -> Trackers | None:
        self._open()
        self.components.make_trackers()
        self.recording.recorder.changed()
        return self.components.trackers

    def _final_answer(self) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Returns summary and instrumentation gaps after the end; waits up to ``ANSWER_S`` for an agent that is late."""
        if self._is_over and threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_S)
        return self._final or ({}, [])

    def hand_over(self) -> bool:
        """Writes the rows up to now before the program finishes a tracker run; returns whether all were written in time."""
        timeout_s = self._config.exit_timeout_s
        self.report(fresh=True)
        self.ask("hand_over", timeout_s=timeout_s)
        trackers = self.components.trackers
        return trackers is None or trackers.emptied(timeout_s / 2)

    # -- the service thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        guard = Guard("agent")
        while not guard.closed:
            has_returned = False
            with guard:
                self.connection.set_aside()
                self._agent_has_ended = self._serve_one()
                has_returned = True
            if not has_returned:  # a fault of this thread: its agent goes on, and counts the rank
                continue
            self.connection.channel.fail_questions()
            if self._is_ending or (self.connection.thread is not None and self.opened is None):
                break
            with guard:
                self._start_another()
        if guard.closed:  # the agent reads the events on without reports
            self.connection.channel.fail_questions()
            self.connection.channel.close()
        self.connection.log_problem()
        self.connection.is_up.set()
        self._is_opened.set()

    def _hello(self) -> Hello:
        page = terminal_of(sys.stderr) if sys.stderr is not None else ()
        return Hello(
            config=self._config, info=self.info, environ=self._environ, origins=self._origins,
            anchor=self._anchor, resource=torch_versions(), page=page, again=self.opened is not None,
            oom_kills=OomKills(self.info.pid),
        )  # fmt: skip

    def _serve_one(self) -> bool:
        """Sends reports and executes requests until the session ends; returns whether the agent has closed the connection before."""
        interval_s = self._config.tuned().poll_interval_s
        turned_s = began_s = time.monotonic()
        try:
            while not self._is_over:
                now_s = time.monotonic()
                self._log_silence(now_s - began_s)
                pause_s = (
                    interval_s if self.components.capture_is_requested else self._reports.pause_s(interval_s)
                )
                if now_s >= turned_s + pause_s or self._report_is_requested:
                    turned_s = now_s
                    if self._is_opened.is_set():  # before that the agent does not read reports
                        self._report_is_requested = False
                        self.report()
                        self.components.poll()
                        self._update_end_work()
                        continue
                self._receive(turned_s + pause_s - now_s)
            if self._state is State.ENDED:
                self._await_final_answer()
        except EOFError:
            return True
        return False

    def _log_silence(self, waited_s: float) -> None:
        if waited_s <= SILENT_S or self._silence_logged or self._is_opened.is_set():
            return
        if self.connection.channel.wait(0.0):  # a message arrived while another thread held the GIL
            return
        self._silence_logged = True
        self.connection.log_silence(waited_s)

    def _receive(self, timeout_s: float) -> None:
        """Handles the next message, if one comes in time. Only the service thread may receive.

        Raises:
            EOFError: the agent has closed the connection.
        """
        channel = self.connection.channel
        if channel.fileno() in channel.wait(timeout_s):
            self._handle(channel.receive())

    def _receive_in_wait(self, timeout_s: float) -> None:
        """Does what ``_receive`` does while a component waits. An agent that has died is no fault of the component.

        All pending requests are answered with None then; ``_serve_one`` reads the end of the connection again.
        """
        try:
            self._receive(timeout_s)
        except EOFError:
            self.connection.channel.fail_questions()
            time.sleep(TURN_S)

    def _start_another(self) -> None:
        """Connects to another agent after one has died, with the same shared memory.

        Never while one lives: both would count the rank.
        """
        self._agent_has_ended = False
        if not self.connection.start_another(self.info, has_opened=self.opened is not None):
            self._advance_state(State.ABANDONED)
            return
        self._update_end_work()
        with suppress(OSError):  # this agent has ended as well: the service thread reads EOF next
            self.connection.send_hello(self._hello())

    def report(self, *, fresh: bool = False) -> None:
        """Sends a report. If another thread reports, waits for it, but at most ``exit_timeout_s``."""
        if not self._acquire_reporting(self._send_s or self._config.exit_timeout_s):
            return
        is_awaited = threading.current_thread() is not self._thread or self._is_ending
        try:
            with suppress(OSError):
                self._reports.send(
                    self.connection.channel.send, fresh=fresh, pause_s=0.0 if is_awaited else PAUSE_S
                )
        finally:
            self._reporting.release()

    @contextmanager
    def turn(self, timeout_s: float = threading.TIMEOUT_MAX) -> Iterator[bool]:
        """Lets no other thread report until the block ends; yields whether that was possible within ``timeout_s``."""
        acquired = self._acquire_reporting(timeout_s)
        try:
            yield acquired
        finally:
            if acquired:
                self._reporting.release()

    def _acquire_reporting(self, timeout_s: float) -> bool:
        """Returns whether it acquired the lock for reports. The service thread handles messages meanwhile: the holder may await an answer."""
        if threading.current_thread() is not self._thread:
            return self._reporting.acquire(timeout=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while not (acquired := self._reporting.acquire(blocking=False)) and time.monotonic() < deadline_s:
            self._receive_in_wait(TURN_S)
        return acquired

    def _handle(self, message: object) -> None:
        if isinstance(message, Opened):
            self._on_opened(message)
        elif isinstance(message, Response):
            self.connection.channel.take_response(message)
        elif isinstance(message, Request):
            value, component = None, _COMPONENT_OF.get(message.what, "agent")
            guard = self.components.guards[component]
            if not guard.closed or component == "agent":
                with guard:
                    value = getattr(self, f"_do_{message.what}")(*message.args)
            self.connection.channel.respond(Response(message.number, value))

    def _on_opened(self, opened: Opened) -> None:
        self.opened = opened
        self.info = opened.info
        # Not after Ctrl-C: making classes then would keep the interpreter from ending by that signal.
        self.components.on_opened(opened, makes=not self._interrupted)
        self.report(fresh=True)
        self._is_opened.set()

    # -- requests of the agent ---------------------------------------------------------------------

    def _do_say(self, text: str) -> None:
        if sys.stderr is not None:
            print_while_taken(text, sys.stderr)

    def _do_refused(self, why: str) -> None:
        """Handles the agent's rejection of a setting that could not be checked here."""
        if self.connection.thread is None or self._opens_unawaited:
            _log.error("Nothing is exported: %s", why)
        self._refusal = why
        self._advance_state(State.ABANDONED)
        self._is_opened.set()

    def _do_up(self, pid: int) -> None:
        """Handles the message that the agent runs, in process ``pid``; it has not opened the run directory yet."""
        self.connection.pid = pid
        self.connection.is_up.set()

    def _do_report(self) -> None:
        """Handles a request for a report, which ``_serve_one`` sends next."""
        self._report_is_requested = True

    def _do_ended(self, summary: dict[str, Any], gaps: list[dict[str, str]]) -> None:
        self._final = summary, gaps

    def _do_log(self, level: int, text: str) -> None:
        _log.log(level, "%s", text)

    def _do_rows(self, rows: list[FlatRow]) -> None:
        if self.components.trackers is not None:
            self.components.trackers.put(rows)

    def _do_batch(self, batch: ExportBatch) -> None:
        if self.components.providers is not None:
            self.components.providers.export(batch)

    def _do_loop(self, loop: LoopState) -> None:
        self.components.captures.account.loop = loop

    def _do_post(self, body: bytes) -> tuple[int, object]:
        capturing = self.components.captures.set_up_now()
        return (404, {"error": CAPTURES_OFF}) if capturing is None else capturing.post(body)

    def _do_alert(self, name: str) -> str:
        capturing = self.components.captures.set_up_now()
        return CAPTURES_OFF if capturing is None else capturing.ask_by_alert(name)

    def _do_request(self, document: object) -> None:
        self.components.captures.account.request = document

    def _do_exchange(self, which: dict[str, Any]) -> None:
        self.components.connect_ranks(which)

    def _do_exchange_request(self, request: ExchangeRequest) -> None:
        if self.components.exchange is not None:
            self.components.exchange.send(request)

    # -- requests to the agent ---------------------------------------------------------------------

    def _open(self) -> Opened | None:
        """Waits, for ``OPEN_S`` at most, until the agent has opened the run directory; returns its answer."""
        if threading.current_thread() is not self._thread:
            self._is_opened.wait(OPEN_S)
        return self.opened

    def tell(self, what: str, *args: Any) -> None:
        """Sends the agent a request that needs no answer."""
        self.connection.channel.tell(what, *args)

    def ask(self, what: str, *args: Any, timeout_s: float = ANSWER_S, busy: bool = False) -> Any:
        """Returns the agent's answer; None if it does not answer in time. ``busy``: wait longer while the agent works."""
        if os.getpid() != self.info.pid or self._is_over:
            return None
        return self.connection.channel.ask(
            partial(self._await_response, timeout_s=timeout_s, busy=busy), what, *args
        )

    def _ask_fresh(self, what: str, *args: Any) -> Any:
        """Does what ``ask`` does, after a report that lets the agent account all events up to now."""
        self._open()
        self.report(fresh=True)
        return self.ask(what, *args)

    def _await_response(self, box: ResponseBox, *, timeout_s: float, busy: bool) -> Response:
        deadline_s = time.monotonic() + timeout_s
        if threading.current_thread() is self._thread:  # no other thread would receive the response
            while box.empty() and time.monotonic() < deadline_s:
                self._receive_in_wait(deadline_s - time.monotonic())
            return box.get_nowait()
        found: list[Response] = []

        def wait(seconds: float) -> bool:
            with suppress(queue.Empty):
                found.append(box.get(timeout=max(0.0, seconds)))
            return bool(found)

        if busy:
            self.connection.wait_while_working(wait, timeout_s)
        else:
            wait(timeout_s)
        if not found:
            raise queue.Empty
        return found[0]

    # -- the end -----------------------------------------------------------------------------------

    def _update_end_work(self) -> None:
        """Updates whether the session must be closed before SIGTERM ends the process."""
        if self._is_ending:
            return
        with self._end_guard:
            self.when_needed_at_end(self._is_needed_at_end)

    @property
    def _is_needed_at_end(self) -> bool:
        """Whether the agent ends with this process, or a component has work that only this process can finish."""
        return not self.connection.outlives_program or self.components.needs_program

    def close(self, state: str, *, cause: str = "", assumed: bool = False) -> None:
        """Has the agent account the run to its end, and releases everything; ``cause``, ``assumed``: see ``ExitHook``.

        Raises only Ctrl-C, and what another signal handler of the program raises. After Ctrl-C it waits for nothing more.
        """
        timeout_s, guard, began_s = self._config.exit_timeout_s, Guard("close"), time.monotonic()
        ended_ns = system_clock()  # the wait for the agent is not run time
        self._interrupted = state == "interrupted"
        with guard:
            self._record_end(state, ended_ns, assumed=assumed)
        actions: tuple[Callable[[], object], ...] = (
            self.components.stop_captures,
            self.components.signal.remove,
            self.recording.end,
            lambda: self._await_agent(timeout_s),
            lambda: self.report(fresh=True),
            lambda: self.components.end_captures(timeout_s),
            lambda: self._end((state, ended_ns, assumed, cause), timeout_s, began_s),
            lambda: self.components.close(state, timeout_s),
            self._disconnect,
            self._await_thread,
            self.recording.close,
        )
        at_once = {self.components.signal.remove, self.recording.end, self._disconnect}
        if self.connection.thread is None:  # else it still reads the memory
            at_once.add(self.recording.close)
        remaining = iter(actions)
        try:
            _do_all(remaining, guard)
        finally:  # after Ctrl-C some remain
            _do_all((action for action in remaining if action in at_once), guard)

    def _record_end(self, state: str, ended_ns: int, *, assumed: bool = False) -> None:
        """Records in shared memory how the session ends, for an agent that does not get the message."""
        words = self.recording.memory.end_state_words
        words[0], words[1] = ENDS.index(state), assumed
        self.recording.memory.ended_word[0] = ended_ns

    def _await_agent(self, timeout_s: float) -> None:
        """Waits until the agent receives messages; not for an agent that outlives this process and does not work."""
        agent, channel = self.connection, self.connection.channel
        if not agent.outlives_program:
            agent.is_up.wait(BUSY_S)
            agent.wait_while_working(self._is_opened.wait, timeout_s)
            return
        up_s = WRITING_S if agent.pid else timeout_s
        if agent.wait_while_working(agent.is_up.wait, up_s, reading=True):
            agent.wait_while_working(self._is_opened.wait, WRITING_S, reading=True)  # imports its packages
        if not agent.wait_while_working(channel.takes, END_S / 2):
            self._send_s = LEAST_WRITING_S / 2
            channel.limit_sends(self._send_s)

    def _end(self, said: tuple[str, int, bool, str], timeout_s: float, began_s: float) -> None:
        """Requests the end of the run, and waits as long as the kind of agent allows. ``said``: arguments of the request."""
        self._advance_state(State.ENDING)

        def short_s() -> float:
            return max(LEAST_WRITING_S, began_s + END_S - time.monotonic())

        outlives, needed = self.connection.outlives_program, self._is_needed_at_end
        has_ended = self.ask("end", *said, timeout_s=timeout_s if needed else short_s(), busy=True)
        if outlives and needed and has_ended is None and not self._is_over:
            _log.warning(
                "The agent (process %d) has not answered in %g s at the end: what it had for trackers, the console and "
                "providers of this program may be missing there; exit_timeout_s sets how long the end waits",
                self.connection.pid, timeout_s,
            )  # fmt: skip
        is_written = None
        if has_ended or not outlives:
            is_written = self.ask("written", timeout_s=short_s() if outlives else timeout_s, busy=True)
        if is_written is None and self.connection.thread is None and not self._is_over:
            self._thread.join(LEAST_WRITING_S)
            if self._agent_has_ended and not self._thread.is_alive():  # another one reads the shared memory
                self._start_another()

    def _await_final_answer(self) -> None:
        """Receives the final summary and gaps, which may be late, and ignores all other messages."""
        try:
            while self._final is None:
                message = self.connection.channel.receive()
                if isinstance(message, Request) and message.what == "ended":
                    self._do_ended(*message.args)
        finally:
            self.connection.channel.close()

    def _disconnect(self) -> None:
        self._advance_state(State.ENDED)
        if self._final is None and self._thread.is_alive():
            self.connection.channel.end_sends()  # the agent is late: the service thread waits for its final answer
        else:
            self.connection.channel.close()

    def _await_thread(self) -> None:
        """Waits for an agent thread."""
        thread = self.connection.thread
        if thread is not None:  # it ends with this process: data that it has not sent stays in the spool
            thread.join(self._config.exit_timeout_s)
            self.connection.log_problem()

    def abandon_in_fork(self) -> None:
        """Gives the connection up in a forked child; it belongs to the parent."""
        self._advance_state(State.ABANDONED)
        self.components.signal.in_use = False
        self.connection.channel.close_in_fork()


def _do_all(actions: Iterator[Callable[[], object]], guard: Guard) -> None:
    try:
        for action in actions:
            with guard:
                action()
    except Exception:  # of a signal handler of the program, such as a watchdog
        _do_all(actions, guard)
        raise


def _is_finding_module() -> bool:
    """Returns whether this thread is inside a finder of the import system: until it returns no other thread can import."""
    codes = (frame.f_code for frame in frames())
    return any(
        code.co_name == "_find_spec" and code.co_filename == "<frozen importlib._bootstrap>" for code in codes
    )


def _abandon_all_in_fork() -> None:
    for service in list(_services):
        service.abandon_in_fork()


os.register_at_fork(after_in_child=_abandon_all_in_fork)
