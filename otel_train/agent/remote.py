"""The training process as seen by the agent: its reports, and proxies for objects that live there."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from otel_train.accounting.device_times import DevicePairs
from otel_train.accounting.types import TRAIN, StepSource
from otel_train.agent.messages import CAPTURES_OFF, MessageChannel, RankState, Report
from otel_train.config.validation import variable_of
from otel_train.datamodel import Compile, DeviceTimes, ExportBatch, Outcomes, Pace
from otel_train.files import parse_json, read_bytes, replace_text
from otel_train.profiler.requests import KEY_FILE, REQUEST_FILE, leave_request, take_back
from otel_train.recording.events import LoopState, SourceKind, StepRule
from otel_train.safety import Guard

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

    from otel_train.agent.alertmanager import AlertPoller
    from otel_train.agent.ring_reader import SharedRings
    from otel_train.aggregation.run_state import RunState
    from otel_train.config import Config
    from otel_train.distributed.store import ExchangeRequest
    from otel_train.exporters.manager import ExportManager
    from otel_train.instrumentation.dataloader_workers import BatchBuildTimes, WorkerExit
    from otel_train.instrumentation.logged_values import UserEvent, Value
    from otel_train.trackers.metrics import FlatRow

_Entry = TypeVar("_Entry")

_WORK = {
    StepSource.UPDATE: SourceKind.OPTIMIZER,
    StepSource.BACKWARD: SourceKind.BACKWARD,
    StepSource.BATCH: SourceKind.DATA,
    StepSource.MANUAL: SourceKind.MARK,
}
"""Kind of event that a step contains, by what the accounting counts steps by."""

ANSWER_S = 2.0
"""Longest wait for the training process to answer a request for a capture."""

_REQUEST_EVERY_S = 1.0
"""Interval at which the folder of a rank is checked for a request, by the thread that writes to the disk."""

_NO_ANSWER = f"the training process did not answer in {ANSWER_S:g} s; ask again"

MOST_UNREAD_VALUES = 1 << 17
MOST_UNREAD = 4096
MOST_UNREAD_ARRAYS = 256
"""Most entries of reports that wait for the export loop, by kind: logged values, arrays of operations, others."""

ALERTS_END_S = 0.2
"""Longest wait for a pending HTTP request to an Alertmanager as the run ends."""


class RemoteRecording:
    """Rings and reports of a rank, for the export loop.

    The thread of the connection stores reports, the thread of the export loop takes them out.

    Args:
        send: ``send(what, *args)`` sends the rank a request that needs no answer.

    Attributes:
        asked_s: monotonic time, in seconds, at which the rank was asked for a report; 0 once it has arrived.
        logged: values and events that the program logged.
        builds: build times of batches by DataLoader workers, by loader.
        exits: workers that have died, by loader.
        compiles: compilations.
        records: reports of other ranks; the last that were fetched.
    """

    def __init__(self, rings: SharedRings, send: Callable[..., None]) -> None:
        self.rings = rings
        self.send = send
        self.state = RankState()
        self.exchange = (False, 0)
        self.reports = 0
        self.scale: float | None = None
        self.asked_s = 0.0
        self.logged: deque[Value | UserEvent] = deque(maxlen=MOST_UNREAD_VALUES)
        self.records: deque[dict[int, str]] = deque(maxlen=1)
        self.builds: deque[tuple[str, BatchBuildTimes]] = deque(maxlen=MOST_UNREAD)
        self.exits: deque[tuple[str, WorkerExit]] = deque(maxlen=MOST_UNREAD)
        self.compiles: deque[Compile] = deque(maxlen=MOST_UNREAD)
        self._outcomes: deque[Outcomes] = deque(maxlen=MOST_UNREAD)
        self._operations: deque[array[int]] = deque(maxlen=MOST_UNREAD_ARRAYS)
        self._device_steps: deque[tuple[int, int]] = deque(maxlen=MOST_UNREAD)
        self._dropped = 0
        self._reported = 0, 0
        self._pairs = DevicePairs(rings.device_ring, lambda: rings.sources)
        self._asking = threading.Lock()

    def advance(self) -> None:
        """Lets the export loop read the events written up to now, or requests a report if one is needed to interpret them."""
        if self.state.follows:  # it reports unrequested; only a report says whether a step was captured
            return
        self.rings.advance()
        if not self.rings.covered:
            with self._asking:
                if self.asked_s:
                    return
                self.asked_s = time.monotonic()
            self.send("report")

    def take_in(self, report: Report) -> None:
        """Stores a report of the rank."""
        self.asked_s = 0.0
        if report.state is not None:
            self.state = report.state
        if any(report.device_steps):
            self._add(self._device_steps, report.device_steps)
        if report.outcomes is not None:
            self._add(self._outcomes, report.outcomes)
        if report.scale is not None:
            self.scale = report.scale
        self._add(self.compiles, *report.compiles)
        self._add(self.logged, *report.logged_values)
        if report.operations:
            self._add(self._operations, report.operations)
        self._add(self.builds, *report.builds)
        self._add(self.exits, *report.exits)
        self.reports, self._reported = report.reports, report.reported
        if report.records is not None:
            self.records.append(report.records)
        self.exchange = report.exchange
        self.rings.limit(report.positions, report.changes)

    def take_in_unreported(self) -> None:
        """Reads from shared memory the values and operations that a rank which has died had not reported."""
        values, operations, lost = self.rings.unreported(self._reported)
        self._dropped += lost
        self._add(self.logged, *values)
        if operations:
            self._add(self._operations, operations)

    def _add(self, box: deque[_Entry], *entries: _Entry) -> None:
        """Adds entries for the export loop; the oldest beyond the bound are dropped and counted: the loop may be switched off."""
        self._dropped += max(0, len(box) + len(entries) - (box.maxlen or 0))
        box.extend(entries)

    def outcomes(self) -> Outcomes:
        """Returns the outcomes of updates under a gradient scaler since the last call."""
        return Outcomes(*map(sum, zip((0, 0, 0), *drained(self._outcomes), strict=True)))

    def operations(self) -> np.ndarray:
        """Returns the operations timed by token since the last call: int64[n, 3], operation, begin and end in nanoseconds."""
        return np.frombuffer(b"".join([*drained(self._operations)]), dtype=np.int64).reshape(-1, 3)

    def device_times(self) -> DeviceTimes | None:
        """Returns the device times since the last call, from shared memory and reports."""
        times = self._pairs.take()
        if times is None:
            return None
        seen, sampled = map(sum, zip((0, 0), *drained(self._device_steps), strict=True))
        return times._replace(pace=times.pace.plus(Pace(seen=seen, sampled=sampled)))

    @property
    def dropped(self) -> int:
        """Number of logged values, readings and operations that exceeded a queue, in the rank or here."""
        return self.state.dropped + self._pairs.missed + self._dropped

    @property
    def spent_ns(self) -> int:
        """Overhead of otel_train on the threads of the rank in nanoseconds, as sampled there."""
        return self.rings.spent_ns + self.state.spent_ns

    def dataset_bytes(self, loaders: Iterable[str]) -> int | None:
        """Returns the bytes of the datasets of these loaders, each dataset once; None if no size is known."""
        known = self.state.datasets
        found = dict(known[name] for name in loaders if name in known)
        return sum(found.values()) if found else None

    def faults(self) -> Mapping[str, int]:
        """Returns the faults in the rank and in the copy to ``flight.bin``, by component."""
        copy = self.rings.guard
        return {**self.state.faults, copy.part: copy.faults}


class RemoteTrackers:
    """Proxy of ``Trackers``: the training process runs them, counts their faults and closes them."""

    def __init__(self, remote: RemoteRecording) -> None:
        self._remote = remote

    @property
    def any(self) -> bool:
        """See ``Trackers``."""
        return self._remote.state.trackers

    def listened(self) -> bool:
        """See ``Trackers``."""
        return self._remote.state.listened

    def put(self, rows: Iterable[FlatRow]) -> None:
        """See ``Trackers``."""
        new_rows = list(rows)
        if new_rows:
            self._remote.send("rows", new_rows)


class RemoteExchange:
    """Proxy of ``Exchange``: the training process has the connection to the store of the process group."""

    def __init__(self, remote: RemoteRecording, **which: Any) -> None:
        self._remote = remote
        remote.send("exchange", which)

    @property
    def faults(self) -> int:
        """Number of faults of the exchange in the rank."""
        return self._remote.exchange[1]

    @property
    def off(self) -> bool:
        """See ``Exchange``."""
        return self._remote.exchange[0]

    def send(self, request: ExchangeRequest) -> None:
        """See ``Exchange``."""
        self._remote.send("exchange_request", request)

    def take(self) -> dict[int, str] | None:
        """See ``Exchange``."""
        return self._remote.records.popleft() if self._remote.records else None


class RemoteProviders:
    """Exporter that sends batches to the rank, which exports them through the program's OpenTelemetry providers."""

    def __init__(self, remote: RemoteRecording) -> None:
        self._remote = remote

    def export(self, batch: ExportBatch) -> None:
        """Sends one batch to the rank."""
        self._remote.send("batch", batch)

    def close(self, timeout_s: float) -> None:
        """Does nothing: the rank closes the exporter."""


class RemoteCaptures:
    """Proxy of ``Capturing``: ``torch.profiler`` and the capture controller run in the training process.

    Passes on requests for captures from HTTP clients, request files in the folder of the rank, and an Alertmanager.
    """

    def __init__(
        self, remote: RemoteRecording, channel: MessageChannel, exporters: ExportManager, config: Config
    ) -> None:
        self._remote = remote
        self._channel = channel
        self._disk = exporters.disk
        self._on = config.profiler != "off"
        self.folder = RequestFolder(exporters.rank_folder if self._on else None, config.profiler_token)
        self._guard = Guard("captures")
        self._request: object = None
        self._looked_s = 0.0
        self._asked: object = None
        self._sent_loop: LoopState | None = None
        self._alerts: AlertPoller | None = None
        if self._on and config.alertmanager_url:
            from otel_train.agent.alertmanager import AlertPoller

            self._alerts = AlertPoller(
                config.alertmanager_url, run_id=exporters.info.run_id, rank=exporters.info.rank, arm=self._arm,
                headers=config.alertmanager_headers
            )  # fmt: skip

    def post(self, body: bytes, token: str) -> tuple[int, object]:
        """Handles a ``POST /capture``; returns status and body. The rank answers if the token is right."""
        if not self._on:
            return 404, {"error": CAPTURES_OFF}
        refusal = self.folder.refusal(token)
        if refusal:
            return 401, {"error": refusal}
        answer: tuple[int, object] | None = self._ask("post", body)
        return answer or (503, {"error": _NO_ANSWER})

    def publish(self) -> None:
        """Writes the token for ``POST /capture`` to the folder of the rank."""
        self._disk.do(self._guard, self.folder.publish)

    def request_done(self) -> None:
        """Removes the request file: the rank has handled the request."""
        self._request = None
        self._disk.do(self._guard, self.folder.done)

    def ask_for_alerts(self) -> None:
        """Starts polling for alerts. Call it once the rank knows its run directory, which a capture needs."""
        if self._alerts is not None:
            self._alerts.start()

    def faults(self) -> dict[str, int]:
        """Faults in the agent, by component."""
        return self._alerts.counted_faults() if self._alerts is not None else {}

    def poll(self, run: RunState, account: Callable[[], None]) -> None:
        """Sends the rank a new request and, if it needs that, a change in the state of its loop. ``account`` reads the rings."""
        if self._remote.state.needs_step_numbers:
            account()
        if (now_s := time.monotonic()) - self._looked_s >= _REQUEST_EVERY_S:
            self._looked_s = now_s
            self._disk.refresh(self._guard, self._look_for_request)
        request = self._request
        if request != self._asked:
            self._asked = request
            if request is not None:
                self._remote.send("request", request)
        if not self._remote.state.follows and request is None:
            return
        loop = loop_of(run, self._remote.rings)
        if loop != self._sent_loop:
            self._sent_loop = loop
            self._remote.send("loop", loop)

    def close(self, timeout_s: float = ALERTS_END_S) -> None:
        """Stops polling for alerts. The rank itself ends a running capture."""
        if self._alerts is not None:
            self._alerts.close(min(timeout_s, ALERTS_END_S))

    def _look_for_request(self) -> None:
        self._request = self.folder.waiting()

    def _arm(self, alert: str) -> str:
        """Requests a capture by an alert; returns "" if accepted, else the reason."""
        refusal: str | None = self._ask("alert", alert)
        return _NO_ANSWER if refusal is None else refusal

    def _ask(self, what: str, *args: Any) -> Any:
        return self._channel.ask(lambda box: box.get(timeout=ANSWER_S), what, *args)


_MOST_REQUEST_BYTES = 1 << 16


class RequestFolder:
    """Request files in the folder of a rank, and the token for ``POST /capture``.

    ``folder`` is None without a run directory and if captures are off. An empty ``token`` is replaced by a random one.
    """

    def __init__(self, folder: Path | None, token: str) -> None:
        self._folder = folder
        self._token = token or secrets.token_urlsafe(24)

    def refusal(self, token: str) -> str:
        """Returns why a client with this token is refused; "" if it is not."""
        if hmac.compare_digest(token.encode(), self._token.encode()):
            return ""
        where = str(self._folder / KEY_FILE) if self._folder else variable_of("profiler_token")
        return f"the token is wrong or missing: 'Authorization: Bearer ...', see {where}"

    def publish(self) -> None:
        """Writes the token to a file that only the user of the agent can read."""
        if self._folder is not None:
            replace_text(self._folder / KEY_FILE, self._token + "\n")

    def withdraw(self) -> None:
        """Removes the file of the token."""
        if self._folder is not None:
            with suppress(OSError):  # the token is useless after the end in any case
                (self._folder / KEY_FILE).unlink()

    def waiting(self) -> object:
        """Returns the waiting request, or text that says why it cannot be read; None if there is none."""
        # A folder that cannot be read, such as one on an unreachable file server, counts as having no request.
        if self._folder is None or not os.path.lexists(path := self._folder / REQUEST_FILE):
            return None
        try:
            return parse_json(read_bytes(path, _MOST_REQUEST_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"{path}: {error}"

    def done(self) -> None:
        """Removes the request file."""
        if self._folder is not None:
            (self._folder / REQUEST_FILE).unlink(missing_ok=True)

    def pass_on(self, ranks: Iterable[int], request: dict[str, Any]) -> str:
        """Writes a request to the folders of other ranks of this run, to all or none; returns why that is not possible, else ""."""
        if self._folder is None:
            return "without a run directory only the rank that is asked can be captured"
        folders = {rank: self._folder.parent / f"rank{rank}" for rank in ranks}
        for rank, folder in folders.items():
            if not folder.is_dir():
                return f"rank {rank} has no folder in {folder.parent}"
        try:
            for folder in folders.values():
                leave_request(folder, request)
        except OSError as error:
            for each in folders.values():
                take_back(each, request)
            return f"{folder}: the request cannot be written: {error}"
        return ""


def rule_of(run: RunState) -> StepRule | None:
    """Returns how the profiler recognises step boundaries from events; None while that is unknown."""
    work, leading = _WORK.get(run.step_source), run.leading
    if work is None or leading is None:
        return None
    names = run.totals.names.loaders.names
    trained = {names[loader] for loader, phase in run.totals.batches if phase == TRAIN}
    return StepRule(
        work, leading.account.asks, frozenset(names[loader] for loader, _ in run.totals.batches) - trained
    )


def loop_of(run: RunState, rings: SharedRings) -> LoopState:
    """Returns the state of the training loop, as a message to the rank."""
    leading = run.leading
    slots = {id(thread): thread.slot for thread in rings.threads}
    ring = slots.get(leading.key, 0) if leading else 0
    return LoopState(
        rule_of(run), ring, run.step_number, run.sampler.median_ns, run.epochs.at(run.final_ns),
        run.final_ns, run.sampler.slow
    )  # fmt: skip


def drained(box: deque[_Entry]) -> Iterator[_Entry]:
    """Removes and yields the entries that another thread has added, oldest first."""
    while box:
        yield box.popleft()
