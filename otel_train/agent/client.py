"""The training process's side of the agent: starts it, sends reports, executes its requests, waits for it at the end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.agent.messages import FOLDER, Hello, LoopProgress, OomKills, Opened, Request, Response
from otel_train.agent.process import (
    AgentThread,
    ProcessActivity,
    connect_agent,
    descriptor_of,
    ends_its_container,
    start_of_job,
)
from otel_train.agent.reports import (
    PAUSE_S,
    ReportBuilder,
    has_automatic_captures,
    may_use_trackers,
    uses_trackers,
)
from otel_train.config.settings import CODE, TRACKERS
from otel_train.console import print_while_taken, terminal_of
from otel_train.datamodel import system_clock
from otel_train.errors import ConfigError
from otel_train.instrumentation.logged_values import CacheSizes
from otel_train.instrumentation.manager import InstrumentationManager
from otel_train.recording.descriptors import require_descriptors
from otel_train.resource import Process, detect, find_job, torch_versions
from otel_train.safety import ENDS, DaemonThread, ExitHook, Guard, cause_of, free_in_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from otel_train.agent.captures import RankCaptures
    from otel_train.agent.messages import MessageChannel, ResponseBox
    from otel_train.agent.rank_end import LauncherFolder
    from otel_train.config.settings import Config
    from otel_train.datamodel import Anchor
    from otel_train.profiler.setup import EpochCaptures, NoEpochCaptures
    from otel_train.trackers.manager import Trackers

BUSY_S = 10.0
"""Longest that the end of a session waits for an agent that works, or waits for a processor. One that is stopped, or waits for
anything else, such as a disk, gets ``WRITING_S``, or ``exit_timeout_s`` where it ends with this process."""

WRITING_S = 0.1
"""Longest that the end waits for an agent which does not answer, where that can go on without this process."""

END_S = 0.08
"""As long may the end take there with a disk which does not answer: the rest of 0.1 s is the interpreter's."""

LEAST_WRITING_S = 0.02
"""The end waits this long for the disk in any case: what comes before may have taken longer."""

OPEN_S = 10.0
"""Longest that a call for the run directory waits for the agent to open it."""

ANSWER_S = 10.0
"""Longest that a thread which asks for a summary waits."""

TURN_S = 0.01
"""How often the service thread looks whether another thread's report is over."""

MOST_STARTS = 3
"""Agents that may die, each within ``STEADY_S``, before nothing more is exported."""

STEADY_S = 60.0
"""An agent that has lived for longer dies of what does not meet the next one at once."""

_log = logging.getLogger("otel_train")
_services: weakref.WeakSet[AgentClient] = weakref.WeakSet()


class AgentClient:
    """The connection of a training process to its agent.

    A service thread sleeps until the agent asks for something, or until ``ReportBuilder.pause_s`` is over. No other thread of the
    program ever waits for the agent, except one that calls ``summary()`` or ends the session.

    Attributes:
        here: the agent, where it is a thread of this process.
        info: identity of the run and the rank; run and attempt are final once the agent has opened the run directory.
        when_needed_at_end: called with whether there is something that only this process can finish.

    Raises:
        ConfigError: a setting cannot be honoured.
        OSError: no memory can be shared, or no process started here.
        RuntimeError: no thread can be started.
    """

    when_needed_at_end: Callable[[bool], None] = staticmethod(lambda _: None)
    _send_s = 0.0

    def __init__(
        self, config: Config, environ: Mapping[str, str], *, origins: Mapping[str, str], anchor: Anchor
    ) -> None:
        self._config = config
        self._environ = dict(environ)
        self._origins = origins if isinstance(origins, dict) else dict(origins)  # with what is ignored
        self._anchor = anchor
        self._main = threading.get_ident()
        require_descriptors(above=config.agent == "process")
        self.info = detect(config, environ, process=Process(start=start_of_job))
        self.caches = CacheSizes()
        self.recording = InstrumentationManager(
            config, self.info, anchor=anchor, environ=environ, job=find_job
        )
        self._reports = ReportBuilder(self.recording, self.caches, self.info.world_size)
        self._reporting = free_in_forks(threading.RLock())
        self.opened: Opened | None = None
        self._is_up, self._is_open = threading.Event(), threading.Event()
        self._over: bool = False
        self._ending = self._interrupted = self._found = self._asked_for_report = self._is_unawaited = False
        self.signals = self._starts = self._agent = 0
        self._connected_s = time.monotonic()
        self._last: tuple[dict[str, Any], list[dict[str, str]]] | None = None
        self._setting_up, self._end_guard = threading.Lock(), Guard("trackers")
        self._providers: Any = None
        self._refusal, self._in_container = "", ends_its_container()
        self.here: AgentThread | None = None
        self._said: AgentThread | None = None
        try:
            self._check_settings()
            self._channel = self._first_agent()
        except BaseException:
            self.recording.end()
            self.recording.close()
            raise
        self._thread = DaemonThread(target=self._serve, name="otel-train-service", daemon=True)
        _services.add(self)

    def start(self) -> None:
        """Starts recording and reporting.

        Raises:
            ConfigError: an agent in a thread cannot honour a setting. One in a process logs it.
            OSError: the agent is gone.
            RuntimeError: no thread can be started.
        """
        greeted = False
        try:
            self._preload_modules()
            self._update_end_work()
            self.recording.begin()
            self._install_sigusr2()
            self._send_first_hello()  # before anything else is sent
            greeted = True
            self._thread.start()
            if self.here is not None:
                self._await_opening()
        except BaseException as error:
            state, ended_ns = ExitHook.of(error), system_clock()
            with Guard("close"):
                self._record_end(state, ended_ns)
            if greeted:
                self.tell("end", state, ended_ns, False, cause_of(error) if state == "failed" else "")
            self._over = True
            self._remove_sigusr2()
            self.recording.end()
            self._channel.close()
            for thread in (self._thread, self.here):
                if thread is not None and thread.is_alive():
                    thread.join(self._config.exit_timeout_s)
            self.recording.close()
            raise

    def _preload_modules(self) -> None:
        """Imports what the service thread needs: an import during training would hold the GIL."""
        wanted = []
        if self.info.world_size > 1:
            wanted.append("otel_train.distributed.store")
        if uses_trackers(self._config):
            wanted += ["otel_train.trackers.manager", "otel_train.instrumentation.dataset_size"]
        if has_automatic_captures(self._config):
            wanted += ["otel_train.agent.captures", "otel_train.profiler.setup"]
        if _counts_flops(self._config):
            wanted += ["otel_train.agent.captures", "otel_train.profiler.flops"]
        for name in wanted:
            import_module(name)

    def _await_opening(self) -> None:
        self._is_unawaited = _is_finding_module()
        if self._is_unawaited:  # the agent's thread imports once this one lets it
            return
        self._is_open.wait(OPEN_S)
        if self._refusal:
            raise ConfigError(self._refusal)
        if self.opened is None:
            problem = self.here.problem if self.here is not None else ""
            raise RuntimeError(problem or "the agent did not begin")

    def _first_agent(self) -> MessageChannel:
        if self._config.agent == "process" and self.recording.memory.descriptor < 0:
            return self._agent_instead("no memory can be shared")
        if self._config.agent == "process":
            launcher = self._launcher() if self._environ.get(FOLDER) else None
            try:
                return self._connect()
            except OSError as error:
                if launcher is not None:
                    launcher.closed()
                return self._agent_instead(error)
        return self._agent_here()

    def _agent_instead(self, problem: object) -> MessageChannel:
        """Begins an agent in a thread, because of a problem of one in a process.

        Raises:
            OSError: no thread is left for one, or no socket.
        """
        try:
            link = self._agent_here()
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"no agent can run beside this process ({problem}) or in a thread of it ({error})"
            ) from error
        _log.warning("No agent can run beside this process (%s): a thread of it does its work", problem)
        return link

    def _launcher(self) -> LauncherFolder:
        from otel_train.agent.rank_end import LauncherFolder

        launcher = LauncherFolder(self._environ, self.info.pid)
        launcher.opened()
        return launcher

    def _connect(self) -> MessageChannel:
        self._is_up.clear()
        link, self._found, self._agent = connect_agent(self.info, self._environ)
        return link

    def _agent_here(self) -> MessageChannel:
        require_descriptors(above=False)
        self.here = AgentThread(self.recording.memory.map, self._config.exit_timeout_s)
        return self.here.link

    def _install_sigusr2(self) -> None:
        """Handles SIGUSR2 if the program does not: its default action ends the process."""
        if self._config.profiler == "off" or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGUSR2)
        # A session that another thread closed could not remove its own handler.
        before = getattr(handler, "__self__", None)
        if handler is signal.SIG_DFL or (isinstance(before, AgentClient) and before._over):  # noqa: SLF001 - of this class
            signal.signal(signal.SIGUSR2, self._on_sigusr2)

    def _on_sigusr2(self, *_: object) -> None:
        self.signals += 1
        self.recording.recorder.changed()

    def _remove_sigusr2(self) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGUSR2) == self._on_sigusr2:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    # -- what the session asks -------------------------------------------------------------------

    @property
    def run_directory(self) -> Path | None:
        """Folder of this run; None when it could not be made. Waits for the agent to open it."""
        opened = self._open()
        return Path(opened.run_directory) if opened is not None and opened.run_directory else None

    @property
    def metrics_url(self) -> str | None:
        """Address of ``/metrics``; None when it is not served. Waits as well."""
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
        from otel_train.exporters.otel_providers import ProviderExporter
        from otel_train.exporters.plugins import PluginExporter

        exporter = ProviderExporter(opened.resource, **providers)
        self._providers = PluginExporter("your providers", exporter, self._config.exit_timeout_s)
        self._update_end_work()
        self.ask("providers")

    def show_blocks(self, blocks: frozenset[str]) -> None:
        """See ``Session.show_blocks``."""
        trackers = self._trackers()
        if trackers is not None:
            trackers.show(blocks)
        capturing = self.captures.set_up() if "profiler" in blocks else None
        if capturing is not None:
            capturing.show_block()

    def epoch_captures(self) -> EpochCaptures | NoEpochCaptures:
        """See ``Session.epoch_captures``."""
        self._open()
        return self.captures.of_epochs()

    def capture(self, request: dict[str, Any]) -> str:
        """See ``Session.capture``."""
        self._open()
        return self.captures.capture(request)

    def summary(self, state: str) -> dict[str, Any]:
        """Returns the summary up to now, or since ``reset_window``; empty where there is no agent any more."""
        return self._of_end()[0] if self._ending else self._ask_fresh("summary", state) or {}

    def reset_window(self) -> None:
        """Lets ``summary`` start from now."""
        if not self._ending:
            self._ask_fresh("reset_window")

    def instrumentation_gaps(self) -> list[dict[str, str]]:
        """Returns what could not be instrumented, with the reason."""
        return self._of_end()[1] if self._ending else self._ask_fresh("instrumentation_gaps") or []

    def _of_end(self) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Returns summary and instrumentation gaps of the end; waits for an agent that is late."""
        if self._over and threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_S)
        return self._last or ({}, [])

    def close(self, state: str, *, cause: str = "", assumed: bool = False) -> None:
        """Has the agent count to the end, and gives everything back. Never raises. ``cause``, ``assumed``: see ``ExitHook``."""
        timeout_s, guard, began_s = self._config.exit_timeout_s, Guard("close"), time.monotonic()
        ended_ns = system_clock()  # to wait for the agent is no time of the run
        self._interrupted = state == "interrupted"
        with guard:
            self._record_end(state, ended_ns, assumed=assumed)
        parts: tuple[Callable[[], object], ...] = (
            self._stop_captures,
            self._remove_sigusr2,
            self.recording.end,
            lambda: self._await_agent(timeout_s),
            lambda: self.report(fresh=True),
            lambda: self._end_captures(timeout_s),
            lambda: self._end((state, ended_ns, assumed, cause), timeout_s, began_s),
            self._close_trackers,
            self._disconnect,
            self.recording.close,
        )
        for part in parts:
            with guard:
                part()

    def _record_end(self, state: str, ended_ns: int, *, assumed: bool = False) -> None:
        """Records in shared memory how the session ends, for an agent that gets no message of it."""
        words = self.recording.memory.end_state_words
        words[0], words[1] = ENDS.index(state), assumed
        self.recording.memory.ended_word[0] = ended_ns

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        guard = Guard("agent")
        while not guard.closed:
            with guard:
                if self.here is None:
                    self.recording.memory.set_descriptor_aside()
                    self._channel.set_aside()
                self._serve_one()
            self._channel.fail_questions()
            if self._over or self._ending or (self.here is not None and self.opened is None):
                break
            with guard:
                self._start_again()
        self._say_problem()
        self._is_up.set()
        self._is_open.set()

    def _say_problem(self) -> None:
        """Logs once why an agent in a thread has ended."""
        if self.here is not None and self.here.problem and self._said is not self.here:
            self._said = self.here
            _log.error("Nothing more is exported: %s", self.here.problem)

    def _send_first_hello(self) -> None:
        # An agent that is gone already has left after its last rank, or was killed: the thread starts another. One in a thread could
        # not begin: what waits for it says why.
        try:
            self._send_hello(self._channel)
        except ConnectionError:
            pass
        except OSError as error:  # a sandbox in which no descriptor can be passed
            if self.here is not None:
                raise
            self._channel.close()
            self._channel = self._agent_instead(error)
            with suppress(ConnectionError):
                self._send_hello(self._channel)

    def _send_hello(self, link: MessageChannel) -> None:
        page = terminal_of(sys.stderr) if sys.stderr is not None else ()
        hello = Hello(
            config=self._config, info=self.info, environ=self._environ, origins=self._origins,
            anchor=self._anchor, resource=torch_versions(), page=page, again=self.opened is not None,
            oom_kills=OomKills(self.info.pid),
        )  # fmt: skip
        if self.here is not None:
            link.send(hello)
            return
        process = descriptor_of(os.getpid())
        given = (self.recording.memory.descriptor, process)
        try:
            link.send(hello, tuple(descriptor for descriptor in given if descriptor >= 0))
        finally:
            if process >= 0:
                os.close(process)

    def _serve_one(self) -> None:
        """Sends reports and executes requests until the connection closes or the session ends."""
        interval_s = self._config.tuned().poll_interval_s
        turned_s = time.monotonic()
        with suppress(EOFError):
            while not self._over:
                now_s = time.monotonic()
                pause_s = interval_s if self._capture_is_requested() else self._reports.pause_s(interval_s)
                if now_s >= turned_s + pause_s or self._asked_for_report:
                    turned_s = now_s
                    if self._is_open.is_set():  # before, the agent takes nothing
                        self._asked_for_report = False
                        self.report()
                        self._run_once()
                        continue
                self._receive(turned_s + pause_s - now_s)
            if self._ending:
                self._await_last()

    def _receive(self, timeout_s: float) -> None:
        """Handles the next message, if one comes in time. Only the service thread may receive.

        Raises:
            EOFError: the agent is gone.
        """
        if self._channel.fileno() in self._channel.wait(timeout_s):
            self._handle(self._channel.receive())

    def _await_last(self) -> None:
        """Receives what the agent says at the end, which may be late, and nothing else."""
        try:
            while self._last is None:
                message = self._channel.receive()
                if isinstance(message, Request) and message.what == "ended":
                    self._do_ended(*message.args)
        finally:
            self._channel.close()

    def _start_again(self) -> None:
        """Connects to a new agent after one has died, with the same memory; in a thread of this process if none can be started."""
        if self._channel.is_closed_elsewhere():
            self._over = True
            _log.warning(
                "The program has closed the connection to its agent: logged values and the run summary are not exported"
            )
            return
        before_s, self._connected_s = self._connected_s, time.monotonic()
        self._starts = 1 if self._connected_s - before_s > STEADY_S else self._starts + 1
        self._channel.close()
        if self._starts > MOST_STARTS:
            self._over = True
            _log.error(
                "The agent has ended %d times, each time within %g s of its start: nothing more is exported",
                self._starts, STEADY_S,
            )  # fmt: skip
            return
        try:
            self._channel = link = self._next_agent()
        except (OSError, RuntimeError) as error:
            self._over = True
            _log.error(
                "Nothing more is exported: no other agent can be started (%s). Raise pids.max, ulimit -u or ulimit -n",
                error,
            )
            return
        self._update_end_work()
        with suppress(OSError):  # it has left since: the end of the connection tells so
            self._send_hello(link)

    def _next_agent(self) -> MessageChannel:
        """Connects to another agent, or begins one in a thread of this process.

        Raises:
            OSError: no process and no descriptor is left for one.
            RuntimeError: no thread is left for one.
        """
        try:
            if self._found and not self._is_up.is_set():  # it was about to leave
                return self._connect()
            if self.opened is None and self._starts > 1:  # it cannot run here
                _log.warning("The agent ended before it began: a thread of this process does its work")
                return self._agent_here()
            _log.warning("The agent has ended; another one goes on")
            return self._connect() if self.here is None else self._agent_here()
        except OSError as error:
            _log.warning("No other agent can be started (%s): a thread of this process goes on", error)
            return self._agent_here()

    def report(self, *, fresh: bool = False) -> None:
        """Reports what is new. Waits for another report, but not for long."""
        if not self._take_turn(self._send_s or self._config.exit_timeout_s):
            return
        hurried = threading.current_thread() is not self._thread or self._ending
        try:
            with suppress(OSError):
                self._reports.send(self._channel.send, fresh=fresh, pause_s=0.0 if hurried else PAUSE_S)
        finally:
            self._reporting.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets no other thread report until the block ends."""
        self._take_turn(threading.TIMEOUT_MAX)
        try:
            yield
        finally:
            self._reporting.release()

    def _take_turn(self, timeout_s: float) -> bool:
        """Waits for a report of another thread; returns whether that is over. The thread of it may wait for an answer."""
        if threading.current_thread() is not self._thread:
            return self._reporting.acquire(timeout=timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while not (taken := self._reporting.acquire(blocking=False)) and time.monotonic() < deadline_s:
            self._receive(TURN_S)
        return taken

    def _handle(self, message: object) -> None:
        if isinstance(message, Opened):
            self._on_opened(message)
        elif isinstance(message, Response):
            self._channel.take_response(message)
        elif isinstance(message, Request):
            done = None
            with Guard(message.what):
                done = getattr(self, f"_do_{message.what}")(*message.args)
            if message.number:
                self._channel.send(Response(message.number, done))

    def _on_opened(self, opened: Opened) -> None:
        self.opened = opened
        self.info = opened.info
        self._reports.may_use_trackers = opened.info.rank == 0 and may_use_trackers(self._config)
        # After Ctrl-C the interpreter ends by that signal, unless classes are made meanwhile.
        if not self._interrupted:
            with Guard("trackers"):
                if uses_trackers(self._config):
                    self._make_trackers()
            with Guard("captures"):
                if has_automatic_captures(self._config):
                    self.captures.set_up()
            with Guard("flops"):
                if _counts_flops(self._config):
                    self.captures.count_flops()
        self.report(fresh=True)
        self._is_open.set()

    # -- what the agent asks -----------------------------------------------------------------------

    def _do_say(self, text: str) -> None:
        if sys.stderr is not None:
            print_while_taken(text, sys.stderr)

    def _do_refused(self, why: str) -> None:
        """Handles a setting that the agent rejects and that could not be checked here."""
        if self.here is None or self._is_unawaited:
            _log.error("Nothing is exported: %s", why)
        self._refusal = why
        self._over = True
        self._is_open.set()

    def _do_up(self, pid: int) -> None:
        """Handles the start of the agent in this process; nothing has been opened yet."""
        self._agent = pid
        self._is_up.set()

    def _do_report(self) -> None:
        """Handles a request of the agent for a report; it is sent when no other request is pending."""
        self._asked_for_report = True

    def _do_ended(self, summary: dict[str, Any], gaps: list[dict[str, str]]) -> None:
        self._last = summary, gaps

    def _do_log(self, level: int, text: str) -> None:
        _log.log(level, "%s", text)

    def _do_rows(self, rows: list[Any]) -> None:
        if self._reports.trackers is not None:
            self._reports.trackers.put(rows)

    def _do_batch(self, batch: Any) -> None:
        if self._providers is not None:
            self._providers.export(batch)

    def _do_loop(self, loop: LoopProgress) -> None:
        self.captures.account.state = loop

    def _do_post(self, body: bytes) -> tuple[int, object]:
        capturing = self.captures.set_up_now()
        return (404, {"error": "captures are off"}) if capturing is None else capturing.post(body)

    def _do_alert(self, name: str) -> str:
        capturing = self.captures.set_up_now()
        return "captures are off" if capturing is None else capturing.ask_by_alert(name)

    def _do_request(self, document: object) -> None:
        self.captures.account.request = document

    def _do_exchange(self, which: dict[str, Any]) -> None:
        from otel_train.distributed.store import Exchange, connect

        self._reports.exchange = Exchange(connect, arrived=self.recording.recorder.changed, **which)

    def _do_exchange_request(self, request: Any) -> None:
        if self._reports.exchange is not None:
            self._reports.exchange.send(request)

    # -- trackers and captures ---------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Rejects settings that the agent could only reject later."""
        config = self._config
        asked = self._origins.get("exporters", CODE) == CODE
        if asked and config.exporters.strip() not in ("auto", "off"):
            from otel_train.exporters.plugins import check_known

            check_known(config.exporters)

        for name in TRACKERS:
            if getattr(config, name) == "on":
                from otel_train.trackers.manager import check_installed

                check_installed(name)

    @property
    def captures(self) -> RankCaptures:
        """What captures, imported when something first needs it."""
        if self._reports.captures is None:
            from otel_train.agent.captures import RankCaptures

            with self._setting_up:
                if self._reports.captures is None:
                    self._reports.captures = RankCaptures(self, self._config, self._anchor)
        return self._reports.captures

    def _make_trackers(self) -> None:
        opened = self.opened
        if opened is None or opened.info.rank != 0:
            return
        from otel_train.trackers.manager import Trackers

        import_module("otel_train.instrumentation.dataset_size")  # of what is logged to them
        with self._setting_up:
            if self._reports.trackers is None:
                folder = Path(opened.run_directory) if opened.run_directory else None
                self._reports.trackers = Trackers(
                    self._config, folder, thread=self._main, before_finish=self._hand_over
                )

    def _capture_is_requested(self) -> bool:
        """Returns whether a signal, a file or an out-of-memory error requests a capture."""
        if self._config.profiler == "off":
            return False
        captures = self._reports.captures
        asked = self.signals or (captures is not None and captures.account.request is not None)
        none_yet = captures is None or captures.capturing is None
        return bool(asked or (none_yet and self.recording.devices.ooms()))

    def _run_once(self) -> None:
        if self._reports.trackers is None and uses_trackers(self._config):
            with Guard("trackers"):
                self._make_trackers()
        asked = self._capture_is_requested()
        if asked or self._reports.captures is not None:
            self.captures.poll(asked=asked)
        self._update_end_work()

    def _update_end_work(self) -> None:
        """Determines what must be closed before SIGTERM ends the process, such as an agent in the same container."""
        if self._ending:
            return
        trackers, captures = self._reports.trackers, self._reports.captures
        with self._end_guard:
            self.when_needed_at_end(
                self.here is not None
                or self._in_container
                or self._providers is not None
                or (trackers is not None and trackers.listened())
                or (captures is not None and captures.recording)
            )

    @property
    def _agent_outlives_us(self) -> bool:
        return self.here is None and not self._in_container

    def _await_agent(self, timeout_s: float) -> None:
        """Waits until the agent accepts messages, unless it is idle and outlives this process."""
        if self._agent_outlives_us:
            up_s = WRITING_S if self._agent else timeout_s
            if self._wait_while_working(self._is_up.wait, up_s, reading=True):
                self._wait_while_working(self._is_open.wait, WRITING_S, reading=True)  # its packages
            if not self._wait_while_working(self._channel.takes, END_S / 2):
                self._send_s = LEAST_WRITING_S / 2
                self._channel.limit_sends(self._send_s)
        else:
            self._is_up.wait(BUSY_S)
            self._wait_while_working(self._is_open.wait, timeout_s)

    def _end(self, said: tuple[str, int, bool, str], timeout_s: float, began_s: float) -> None:
        self._ending = True

        def patience_s() -> float:
            return (
                max(LEAST_WRITING_S, began_s + END_S - time.monotonic())
                if self._agent_outlives_us
                else timeout_s
            )

        has_ended, is_written = self.ask("end", *said, timeout_s=patience_s(), busy=True), None
        if has_ended or not self._agent_outlives_us:
            is_written = self.ask("written", timeout_s=patience_s(), busy=True)
        if is_written is None and self.here is None and not self._over:
            self._thread.join(LEAST_WRITING_S)
            if not self._thread.is_alive():  # the agent has died: another one counts what lies in memory
                self._start_again()

    def _stop_captures(self) -> None:
        if self._reports.captures is not None:
            self._reports.captures.stop()

    def _end_captures(self, timeout_s: float) -> None:
        if self._reports.captures is not None:
            self._reports.captures.end(timeout_s)

    def _trackers(self) -> Trackers | None:
        self._open()
        self._make_trackers()
        self.recording.recorder.changed()
        return self._reports.trackers

    def _hand_over(self) -> bool:
        """Writes the rows up to now before a thread of the program finishes a tracker run."""
        patience_s = self._config.exit_timeout_s
        self.report(fresh=True)
        self.ask("hand_over", timeout_s=patience_s)
        trackers = self._reports.trackers
        return trackers is None or trackers.emptied(patience_s / 2)

    def _close_trackers(self) -> None:
        timeout_s = self._config.exit_timeout_s
        if self._providers is not None:
            self._providers.close(timeout_s)
        if self._reports.trackers is not None:
            self._reports.trackers.close(timeout_s)
        if self._reports.exchange is not None:
            self._reports.exchange.close(timeout_s)

    # -- questions ---------------------------------------------------------------------------------

    def _open(self) -> Opened | None:
        if threading.current_thread() is not self._thread:
            self._is_open.wait(OPEN_S)
        return self.opened

    def tell(self, what: str, *args: Any) -> None:
        """Has the agent do something."""
        self._channel.tell(what, *args)

    def ask(self, what: str, *args: Any, timeout_s: float = ANSWER_S, busy: bool = False) -> Any:
        """Returns what the agent answers; None where it does not in time, or cannot. ``busy``: longer while it works."""
        if os.getpid() != self.info.pid or self._over:
            return None
        return self._channel.ask(partial(self._await_response, timeout_s=timeout_s, busy=busy), what, *args)

    def _ask_fresh(self, what: str, *args: Any) -> Any:
        """Does what ``ask`` does after all events up to now are accounted."""
        self._open()
        self.report(fresh=True)
        return self.ask(what, *args)

    def _wait_while_working(
        self, wait: Callable[[float], object], timeout_s: float, *, reading: bool = False
    ) -> bool:
        """Waits for the agent as long as it makes progress. Returns whether it finished."""
        work, deadline_s = ProcessActivity(self._agent, reading=reading), time.monotonic() + BUSY_S
        while not (done := wait(timeout_s)) and time.monotonic() < deadline_s and work.is_working():
            pass
        return bool(done)

    def _await_response(self, box: ResponseBox, *, timeout_s: float, busy: bool) -> Response:
        deadline_s = time.monotonic() + timeout_s
        if threading.current_thread() is self._thread:  # no other thread receives the response
            while box.empty() and time.monotonic() < deadline_s:
                self._receive(deadline_s - time.monotonic())
            return box.get_nowait()
        found: list[Response] = []

        def wait(seconds: float) -> bool:
            with suppress(queue.Empty):
                found.append(box.get(timeout=max(0.0, seconds)))
            return bool(found)

        if busy:
            self._wait_while_working(wait, timeout_s)
        else:
            wait(timeout_s)
        if not found:
            raise queue.Empty
        return found[0]

    def _disconnect(self) -> None:
        self._over = True
        if self._last is None and self._thread.is_alive():
            self._channel.end_sends()  # the agent is late: the thread waits for it
        else:
            self._channel.close()
        if self.here is not None:  # it ends with this process: what it cannot send by then stays in the spool
            self.here.join(self._config.exit_timeout_s)
            self._say_problem()


def _is_finding_module() -> bool:
    """Returns whether a finder of the import system has called this thread: no other thread can import meanwhile."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented way
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_name == "_find_spec" and code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False


def _counts_flops(config: Config) -> bool:
    return config.flops == "auto" and not config.flops_per_sample


def _let_go_in_fork() -> None:
    """Leaves the connections to the parent, in a forked child."""
    for service in list(_services):
        service._over = True  # noqa: SLF001 - of this module
        service._channel.close_in_fork()  # noqa: SLF001 - as above


os.register_at_fork(after_in_child=_let_go_in_fork)
