"""``python -m benchmarks.scale``: ranks that do not exist, distinguished by whoever receives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.scale.cli import main
from benchmarks.scale.ranks import MOST_ACCOUNTS, SimulatedRanks, as_rank
from benchmarks.scale.workload import EVAL_EVERY_STEPS, Workload
from otel_train.config import Config
from otel_train.datamodel import Anchor
from tests.support.receiver import http_receiver, refusing_address
from tests.support.snapshots import spans

NS_PER_S = 10**9


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def cast_of(ranks: int, profile: str = "full") -> SimulatedRanks:
    config = Config(run_id="r", export_profile=profile)
    return SimulatedRanks(ranks, per_node=8, config=config, anchor=Anchor(10**18, 0), steps_per_s=10)


def attributes_of(message: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in message.attributes}


def resources(requests: list[Any]) -> Iterator[dict[str, Any]]:
    for request in requests:
        for group in getattr(request, "resource_metrics", None) or request.resource_spans:
            yield attributes_of(group.resource)


def test_the_loop_goes_on_where_it_was_read_last() -> None:
    """Ranks are read at odd moments; a batch that fell between two of them would be a gap in every value."""
    whole, parts = Workload(10, 3, 0), Workload(10, 3, 0)
    once = whole.until(40 * NS_PER_S)
    pieces = [parts.until(at) for at in range(0, 40 * NS_PER_S + 1, NS_PER_S // 3 + 1)]
    pieces.append(parts.until(40 * NS_PER_S))

    assert np.array_equal(once.codes, np.concatenate([piece.codes for piece in pieces]))
    assert np.array_equal(once.times, np.concatenate([piece.times for piece in pieces]))
    assert np.all(np.diff(once.times) >= 0)


def test_the_account_finds_the_steps_that_were_simulated() -> None:
    """The values come from the real account: if it does not see the loop, they are of something else."""
    simulated = cast_of(1)
    account = simulated.accounts[0]
    account.read(30 * NS_PER_S)
    account.end(30 * NS_PER_S)

    steps = account.run.totals.steps_by_phase()["train"]
    assert EVAL_EVERY_STEPS < steps <= 300
    assert account.run.evals.durations.count(0) == 1


def test_ranks_beyond_the_accounts_share_values_and_never_a_name() -> None:
    """Two senders of one identity are one series with two truths."""
    simulated = cast_of(3 * MOST_ACCOUNTS)
    identities = {simulated.resource(rank)["service.instance.id"] for rank in simulated.ranks}

    assert len(identities) == len(simulated.ranks) > len(simulated.accounts)
    assert [rank.info.rank for rank in simulated.ranks if rank.account == 0] == [0]


def test_spans_of_another_rank_keep_their_trace_and_get_ids_of_their_own() -> None:
    """A trace in which two ranks have the same span shows one of them."""
    step, child = spans()
    mine, below = as_rank([step, child], 7)

    assert (mine.trace_id, below.trace_id) == (step.trace_id, child.trace_id)
    assert mine.span_id != step.span_id
    assert below.parent_id == mine.span_id


@pytest.mark.parametrize(
    ("profile", "metrics", "traces"), [("rank0_aggregate", {0}, {0, 8}), ("rank0", {0}, {0})]
)
def test_a_profile_decides_which_ranks_send(profile: str, metrics: set[int], traces: set[int]) -> None:
    """The profile is what the values are about."""
    with http_receiver() as received:
        words = ["--ranks", "16", "--profile", profile, "--duration", "1.5", "--export-every", "1"]
        # On a busy machine an export may be left out, which is 1.
        assert main([*words, "--endpoint", received.endpoint, "--json"]) in {0, 1}

    assert {found["train.rank"] for found in resources(received.metrics)} == metrics
    assert {found["train.rank"] for found in resources(received.traces)} == traces


def test_every_rank_sends_and_ends_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that stops without a word raises the alert for runs that vanish."""
    with http_receiver() as received:
        words = ["--ranks", "4", "--duration", "2", "--export-every", "1", "--endpoint", received.endpoint]
        assert main(["--run-id", "synthetic", *words]) in {0, 1}  # as above
    out = capsys.readouterr().out

    assert {found["train.rank"] for found in resources(received.metrics)} == {0, 1, 2, 3}
    assert {found["train.run.id"] for found in resources(received.metrics)} == {"synthetic"}
    last = (
        received.points()["train.run.status"].gauge.data_points
        or received.points()["train.run.status"].sum.data_points
    )
    assert {attributes_of(p)["train.run.state"] for p in last if p.as_double == 1} == {"finished"}
    assert sum(span.name == "train.run.end" for span in received.spans()) == 4
    assert "0 refused" in out


def test_its_values_are_what_the_receiver_got(capsys: pytest.CaptureFixture[str]) -> None:
    """A stack is sized by them."""
    with http_receiver() as received:
        words = ["--ranks", "3", "--duration", "2", "--export-every", "10", "--endpoint", received.endpoint]
        assert main(["--json", *words]) == 0
        values = json.loads(capsys.readouterr().out)
    points = [
        sum(len(getattr(m, m.WhichOneof("data")).data_points) for m in scope.metrics)
        for request in received.metrics
        for scope in request.resource_metrics[0].scope_metrics
    ]

    assert values["samples"] == sum(points[:-3]) > 0
    assert values["series"] == sum(points[-3:]) > values["most_series"] > 0


def test_where_no_server_listens_it_says_so_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """A minute of refused requests has no result."""
    with refusing_address() as place:
        assert main(["--ranks", "64", "--export-every", "0.2", "--endpoint", place]) == 2
    err = capfd.readouterr().err

    assert "otel-train stack up" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words", [["--ranks", "0"], ["--steps-per-second", "0"], ["--duration", "-1"], ["--profile", "some"]]
)
def test_a_wrong_number_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Value, rule and remedy, not a traceback."""
    assert main([*words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ctrl_c_ends_the_run_in_order() -> None:
    """Ctrl-C is the usual end of a simulation; the run has not failed."""
    with http_receiver() as received:
        words = ["--ranks", "2", "--duration", "0", "--export-every", "1", "--endpoint", received.endpoint]
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale", *words], stdout=subprocess.PIPE, text=True
        ) as process:
            assert received.wait(metrics=4, timeout_s=60)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)

    assert process.returncode in {0, 1}  # as above
    assert "failures     0 refused" in out
    assert sum(span.name == "train.run.end" for span in received.spans()) == 2
