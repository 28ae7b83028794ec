"""Which alerts of an Alertmanager arm a capture, and what a bad answer costs."""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from otel_train.agent import alertmanager as alerts
from otel_train.agent.alertmanager import AlertPoller
from otel_train.config import Config
from otel_train.errors import ConfigError
from tests.support.alertmanager import FakeAlertmanager, alert, alertmanager
from tests.support.waiting import until


class Asked:
    """A poller of run ``r``, and the alerts that it asked captures for."""

    def __init__(self, server: FakeAlertmanager, rank: int = 0, **more: Any) -> None:
        self.armed: list[str] = []
        self.refusal = ""
        self.poller = AlertPoller(more.pop("url", server.url), run_id="r", rank=rank, arm=self._arm, **more)
        _begun.append(self.poller)

    def _arm(self, name: str) -> str:
        self.armed.append(name)
        return self.refusal


@pytest.fixture
def server() -> Iterator[FakeAlertmanager]:
    """An Alertmanager without alerts. Whoever asked it is closed in the end."""
    with alertmanager() as made, closing(_begun):
        yield made


@contextmanager
def closing(begun: list[AlertPoller]) -> Iterator[None]:
    try:
        yield
    finally:
        while begun:
            begun.pop().close(5)


_begun: list[AlertPoller] = []


TWO_LOADERS = [alert(fingerprint=number, train_loader=name) for number, name in ("ax", "by")]


@pytest.mark.parametrize(("polls", "armed"), [
    # It fires for hours, and the first capture has shown why.
    pytest.param([([alert()], "")] * 3, ["TrainInputBound"], id="an alert that goes on firing arms one capture"),
    # The cause may be another one this time. An answer without it in between is not needed to tell.
    pytest.param([([alert()], ""), ([alert(started="2026-01-01T11:00:00.000Z")], "")], ["TrainInputBound"] * 2,
                 id="an alert that was resolved and fires again arms again"),
    # Another capture runs, or one of this name was just made.
    pytest.param([([alert()], "a capture is under way"), ([alert()], ""), ([alert()], "")], ["TrainInputBound"] * 2,
                 id="an alert that is refused arms once it can be"),
    # Two loaders that starve the same steps are seen in the same trace.
    pytest.param([([*TWO_LOADERS, alert("TrainMFUDrop", fingerprint="c")], "")] * 2, ["TrainInputBound", "TrainMFUDrop"],
                 id="alerts of one name share a capture and those of two do not"),
])  # fmt: skip
def test_an_alert_arms_once_for_each_time_that_it_fires(
    server: FakeAlertmanager, polls: list[tuple[list[dict[str, Any]], str]], armed: list[str]
) -> None:
    """What is refused is asked for again."""
    asked = Asked(server)
    for server.alerts, asked.refusal in polls:
        asked.poller.poll()

    assert asked.armed == armed
    assert asked.poller.counted_faults() == {"alertmanager": 0}


@pytest.mark.parametrize(
    ("labels", "rank"),
    [
        ({}, 0),
        ({"train_rank": "3"}, 3),
        ({"train_peer_rank": "3"}, 3),
        ({"train_rank": "0", "train_peer_rank": "3"}, 3),
    ],
)
def test_an_alert_arms_the_rank_that_it_is_about_and_no_other(
    server: FakeAlertmanager, labels: dict[str, str], rank: int
) -> None:
    """One without a rank is about the run, which rank 0 judges."""
    server.alerts = [alert(**labels)]
    armed = {}
    for each in (0, 3, 30):
        asked = Asked(server, each)
        asked.poller.poll()
        armed[each] = bool(asked.armed)

    assert armed == {each: each == rank for each in (0, 3, 30)}


@pytest.mark.parametrize(
    "other",
    [
        alert(train_run_id="r2"), alert(capture="false"), alert(state="suppressed"), alert(state="unprocessed"),
        {}, None, 3, {"labels": []}, {"labels": {"alertname": {}}}, alert(train_rank="00"),
    ],
)  # fmt: skip
def test_what_is_not_ours_arms_nothing_though_it_is_answered(server: FakeAlertmanager, other: Any) -> None:
    """A proxy or another server may take no notice of what was asked for."""
    asked = Asked(server)
    server.alerts = [other]
    asked.poller.poll()

    assert asked.armed == []
    assert asked.poller.faults == 0


def test_only_alerts_of_the_own_run_and_rank_are_asked_for(server: FakeAlertmanager) -> None:
    """A thousand ranks ask: the answers must be small."""
    asked = Asked(server, 3, url=f"{server.url.replace('//', '//ann:s3cret@')}/prefix/")
    asked.poller.poll()

    filters = [parameters.pop("filter") for _, parameters, _ in server.asked]
    own = ['train_run_id="r"', 'capture="true"']
    assert filters == [[*own, 'train_peer_rank="3"'], [*own, 'train_peer_rank=""', 'train_rank="3"']]
    for path, parameters, login in server.asked:
        assert path == "/prefix/api/v2/alerts"
        assert parameters == {
            "active": ["true"], "silenced": ["false"], "inhibited": ["false"], "unprocessed": ["false"],
        }  # fmt: skip
        assert login == "Basic YW5uOnMzY3JldA=="


BAD: dict[str, dict[str, Any]] = {
    "an error": {"mode": "500"},
    "nothing there": {"mode": "404"},
    "a redirect": {"mode": "redirect"},
    "a login page": {"body": b"<html>log in</html>"},
    "an object": {"body": b"{}"},
    "deep JSON": {"body": b"[" * 100_000},
    "no text": {"body": b"\xff\xfe"},
    "nothing": {"body": b""},
    "too much JSON": {"body": json.dumps([alert()] * 3000).encode()},
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_answer_costs_one_fault_until_a_good_one_comes(
    how: str, server: FakeAlertmanager, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not switched off: an Alertmanager that restarts comes back."""
    asked = Asked(server, url=server.url.replace("//", "//ann:s3cret@"))
    for name, value in BAD[how].items():
        setattr(server, name, value)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            asked.poller.poll()
    assert asked.armed == []
    assert asked.poller.counted_faults() == {"alertmanager": 1}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "check alertmanager_url" in said
    assert "s3cret" not in said
    assert all(path == "/api/v2/alerts" for path, _, _ in server.asked)

    server.mode, server.body, server.alerts = "ok", None, [alert()]
    asked.poller.poll()
    assert asked.armed == ["TrainInputBound"]


def test_forty_megabytes_are_not_read(server: FakeAlertmanager) -> None:
    """The limit is on what is received, not on what is kept of it."""
    asked = Asked(server)
    server.mode = "huge"
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked.poller.poll()

    assert asked.poller.faults == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 20 << 10


@pytest.mark.parametrize("mode", ["hang", "trickle"])
def test_an_answer_that_does_not_end_is_given_up(
    mode: str, server: FakeAlertmanager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is for the whole answer, not for each byte."""
    monkeypatch.setattr(alerts, "TIMEOUT_S", 0.5)
    asked = Asked(server)
    server.mode, server.alerts = mode, [alert()]
    began_s = time.monotonic()
    asked.poller.poll()

    assert time.monotonic() - began_s < 3
    assert (asked.armed, asked.poller.faults) == ([], 1)


def test_closing_does_not_wait_for_an_answer(server: FakeAlertmanager) -> None:
    """The end of a program must not hang on a server that does; and it is no fault then."""
    asked = Asked(server, every_s=0.05)
    server.mode = "hang"
    asked.poller.start()
    while not server.asked:
        time.sleep(0.01)
    began_s = time.monotonic()
    asked.poller.close(5)

    assert time.monotonic() - began_s < 2
    assert asked.poller.faults == 0


def test_an_absent_alertmanager_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing listens at the address."""
    with alertmanager() as gone:
        url = gone.url
    asked = Asked(gone, url=url)
    with caplog.at_level(logging.WARNING):
        asked.poller.poll()
        asked.poller.poll()

    assert len(caplog.records) == asked.poller.faults == 1
    assert "Connection refused" in caplog.text


def test_the_thread_asks_again_and_again(server: FakeAlertmanager) -> None:
    """Rank 0 at once, the others spread over the time between two questions."""
    asked = Asked(server, every_s=0.05)
    server.alerts = [alert()]
    asked.poller.start()
    until(lambda: len(server.asked) >= 6)
    asked.poller.close(5)

    assert asked.armed == ["TrainInputBound"]


def test_the_name_of_an_alert_does_nothing_to_a_terminal(server: FakeAlertmanager) -> None:
    """It stands in records, logs and events."""
    asked = Asked(server)
    server.alerts = [alert("\x1b[2J" + "x" * 500)]
    asked.poller.poll()

    (name,) = asked.armed
    assert name.startswith("\\x1b[2Jxxx")
    assert len(name) < 110


def test_headers_go_with_each_question(server: FakeAlertmanager) -> None:
    """An Alertmanager behind a proxy that wants a token, or one for several tenants."""
    asked = Asked(server, headers="Authorization=Bearer%20s3cret,x-scope-orgid=team")
    asked.poller.poll()

    assert {login for _, _, login in server.asked} == {"Bearer s3cret"}


def test_a_label_with_quotes_stays_one_matcher(server: FakeAlertmanager) -> None:
    """A run id is whatever the user calls it."""
    poller = AlertPoller(server.url, run_id='a"b\\c{ü}', rank=0, arm=lambda _: "")
    poller.poll()
    poller.close(5)

    assert server.asked[0][1]["filter"][0] == 'train_run_id="a\\"b\\\\c{ü}"'


@pytest.mark.parametrize(
    "url", ["alertmanager:9093", "ftp://a:1", "http://", "http://a:x", "http://[::1", "http://a:1/\n"]
)
def test_an_address_that_cannot_be_asked_is_refused(url: str) -> None:
    """Without showing it: it may hold a password."""
    with pytest.raises(ConfigError, match=r"alertmanager_url=\(not shown\): expected"):
        Config(alertmanager_url=url)
