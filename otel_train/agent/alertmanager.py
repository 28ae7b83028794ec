"""Polls an Alertmanager for firing alerts of this rank and requests captures for them."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit, urlunsplit

from otel_train.exporters.otlp_settings import Target, headers_of
from otel_train.exporters.otlp_transport import HttpClient
from otel_train.files import parse_json
from otel_train.rundata.files import mapping
from otel_train.safety import Guard, daemon_thread, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

EVERY_S: Final = 15.0
"""Seconds between two polls."""

TIMEOUT_S: Final = 5.0
MOST_BYTES: Final = 256 << 10
"""Longest answer that is read: some hundred alerts of one rank."""

MOST_ARMED: Final = 1024
"""Most alerts that are remembered as captured."""

MOST_NAME: Final = 100
"""Most characters of a name that are kept."""

PART: Final = "alertmanager"
"""Component of the faults in ``train.telemetry.faults``."""

RUN, RANK, PEER_RANK, CAPTURE = "train_run_id", "train_rank", "train_peer_rank", "capture"
"""Labels of an alert."""

_PATH: Final = "/api/v2/alerts"
_ACTIVE: Final = {"active": "true", "silenced": "false", "inhibited": "false", "unprocessed": "false"}
_GOLDEN: Final = 0.618033988749895  # (sqrt(5) - 1) / 2: its multiples modulo 1 are spread evenly
_log = logging.getLogger("otel_train")


class FiringAlert(NamedTuple):
    """One firing alert. An alert that is resolved and fires again has another ``starts_at``."""

    name: str
    fingerprint: str
    starts_at: str


class AlertPoller:
    """Polls an Alertmanager on a thread and requests captures for firing alerts.

    An alert requests one capture each time that it begins to fire. If that is refused, by the cooldown of the alert's name or
    because another capture runs, later polls request it again while the alert fires. An outage of the Alertmanager counts
    as one fault and is logged once, until it answers again.

    Args:
        rank: rank of this process. Alerts without a label for the rank belong to rank 0, in every export profile.
        arm: requests a capture for an alert by name; returns "" if it is accepted, else the reason.
        headers: headers of each request, as in ``OTEL_EXPORTER_OTLP_HEADERS``.
    """

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        rank: int,
        arm: Callable[[str], str],
        headers: str = "",
        every_s: float = EVERY_S,
    ) -> None:
        self.faults = 0
        self._run_id = run_id
        self._rank = str(rank)
        self._arm = arm
        self._every_s = every_s
        # Ranks that start together poll at different times.
        self._pause_s = rank * _GOLDEN % 1.0 * every_s
        self._target = _target_of(url, headers)
        self._client = HttpClient(self._target, most_answer_bytes=MOST_BYTES)
        self._answers = True
        self._armed: dict[FiringAlert, None] = {}
        self._stop = threading.Event()
        self._guard = Guard("captures by alerts")
        self._thread = daemon_thread(self._loop, "otel-train-alerts")
        with suppress(OSError):  # the first request reports it
            self._client.prepare()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the thread, and the request that it waits for."""
        self._stop.set()
        self._client.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def counted_faults(self) -> dict[str, int]:
        """Returns the number of faults by component."""
        return {PART: self.faults + self._guard.faults}

    def poll(self) -> None:
        """Polls once; requests captures that are due."""
        try:
            firing = {alert: None for labels in self._questions() for alert in self._ask(labels)}
        except OSError as error:
            self._failed(f"gives no answer ({error})")
            return
        except ValueError as error:
            self._failed(str(error))
            return
        if not self._answers:
            _log.warning("alertmanager: %s answers again", self._target.address)
        self._answers = True
        by_name: dict[str, list[FiringAlert]] = {}
        for alert in firing:
            by_name.setdefault(alert.name, []).append(alert)
        for name, alerts in by_name.items():
            if any(alert not in self._armed for alert in alerts) and not self._arm(name):
                self._armed |= dict.fromkeys(alerts)  # one capture for all firing alerts of a name
        while len(self._armed) > MOST_ARMED:
            self._armed.pop(next(iter(self._armed)))

    def _loop(self) -> None:
        while not self._stop.wait(self._pause_s) and not self._guard.closed:
            self._pause_s = self._every_s
            with self._guard:
                self.poll()

    def _questions(self) -> Iterator[Mapping[str, str]]:
        """Yields label matchers of the queries. An alert about another rank names it in ``train_peer_rank``."""
        yield {PEER_RANK: f"={_quoted(self._rank)}"}
        yield {PEER_RANK: '=""', RANK: '=~"0?"' if self._rank == "0" else f"={_quoted(self._rank)}"}

    def _ask(self, labels: Mapping[str, str]) -> Iterator[FiringAlert]:
        matchers = {RUN: f"={_quoted(self._run_id)}", CAPTURE: '="true"', **labels}
        filters = [("filter", name + matcher) for name, matcher in matchers.items()]
        answer = self._client.get(urlencode([*_ACTIVE.items(), *filters]), TIMEOUT_S)
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"answers {answer.status}")
        if len(answer.body) > MOST_BYTES:
            raise ValueError(f"answers with more than {MOST_BYTES >> 10} KiB")
        try:
            document = parse_json(answer.body)
        except ValueError:
            document = None
        if not isinstance(document, list):
            raise ValueError("answers with something else than a list of alerts")  # noqa: TRY004 - not ours
        return filter(None, (self._read(each) for each in document))

    def _read(self, alert: Any) -> FiringAlert | None:
        """Parses and checks one alert; returns None if it is not an active one of this run and rank."""
        alert = mapping(alert)
        labels, status = mapping(alert.get("labels")), mapping(alert.get("status"))
        rank = labels.get(PEER_RANK) or labels.get(RANK) or "0"
        matches = (labels.get(RUN), rank, labels.get(CAPTURE)) == (self._run_id, self._rank, "true")
        name = labels.get("alertname")
        if not matches or status.get("state") != "active" or not name:
            return None
        texts = (printable(alert.get(key, ""), most=MOST_NAME) for key in ("fingerprint", "startsAt"))
        return FiringAlert(printable(name, most=MOST_NAME), *texts)

    def _failed(self, why: str) -> None:
        if self._answers and not self._stop.is_set():
            self.faults += 1
            _log.warning(
                "alertmanager: %s %s; alerts start no capture until it answers; check alertmanager_url",
                self._target.address, why
            )  # fmt: skip
        self._answers = False


def _target_of(url: str, headers: str) -> Target:
    parts = urlsplit(url)
    parts = parts._replace(path=parts.path.rstrip("/") + _PATH, query="", fragment="")
    return Target(
        protocol="http/json",
        url=urlunsplit(parts),
        address=urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])),
        headers=headers_of(headers),
        tls=parts.scheme == "https",
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
