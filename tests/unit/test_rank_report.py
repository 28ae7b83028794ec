"""What a rank says of itself: small, ASCII, and the same on both ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.catalog import PHASES, RANK_EVENT, STAGES
from otel_train.distributed.rank_report import (
    COUNTED,
    MOST_CHARS,
    NAMED,
    ON_DEVICE,
    RankReport,
    decode,
    encode,
    rank_report,
)
from tests.support.edges import Tape
from tests.support.rank_reports import report
from tests.support.runs import Run

counts = st.integers(0, 10**12)
seconds = st.floats(0, 1e9)
names = st.text(max_size=300)
records = st.builds(
    RankReport,
    rank=st.integers(0, 10**6), host=names, sequence=counts, steps=counts, step=counts, stage=names, loader=names,
    after=st.sampled_from(["", *STAGES]), quiet_s=seconds, stalled=st.booleans(), over=st.booleans(),
    doing=st.text(max_size=50), away_s=seconds, barrier=st.sampled_from(["", "forward", "backward"]), every=counts,
    stages=st.fixed_dictionaries(dict.fromkeys((*STAGES, NAMED), seconds)),
    events=st.fixed_dictionaries(dict.fromkeys(RANK_EVENT.values, counts)), patience_s=seconds,
    counted=st.dictionaries(st.tuples(st.sampled_from(COUNTED), names, st.sampled_from(PHASES)), counts, max_size=20),
    device=st.one_of(st.just({}), st.fixed_dictionaries(dict.fromkeys(ON_DEVICE, seconds))),
    slow=st.one_of(st.just(()), st.tuples(
        st.integers(0, 10**6), names, st.sampled_from(STAGES), seconds, st.floats(1e-9, 1e9), seconds, counts, st.integers(1, 8)
    )),
)  # fmt: skip


@given(records)
def test_no_sample_is_lost_in_a_record(record: RankReport) -> None:
    """Loaders beyond those that fit are added up without a name."""

    def sums(counted: Any) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for (metric, _, phase), number in counted.items():
            found[metric, phase] = found.get((metric, phase), 0) + number
        return found

    assert sums(decode(encode(record)).counted) == sums(record.counted)


def test_a_loader_keeps_its_name_when_others_overtake_it() -> None:
    """The counter of a loader that lost its name would fall, and Prometheus would count all of it again."""
    counted = {("train.samples", f"loader{number}", "train"): 100 for number in range(8)}
    before = decode(encode(report(0, counted=counted))).counted
    after = decode(encode(report(0, counted={**counted, ("train.samples", "loader7", "train"): 900}))).counted

    assert list(before) == list(after)
    assert after["train.samples", "", "train"] == 1000


@given(records)
def test_a_record_is_small_whatever_is_in_it(record: RankReport) -> None:
    """Ten thousand ranks write into the memory of one process: names of any length must not."""
    text = encode(record)

    assert len(text) <= MOST_CHARS
    assert text.isascii()
    assert decode(text).sequence == record.sequence


def test_what_is_read_is_what_was_written() -> None:
    """To the microsecond, and every count."""
    events = dict.fromkeys(RANK_EVENT.values, 0) | {"oom": 2, "stall": 1}
    record = report(
        3, stage="data", loader="train", stages={"data": 1.25, NAMED: 0.000001}, events=events, stalled=True,
        quiet_s=7.5, every=64, after="", counted={("train.samples", "train", "train"): 640},
        device={"h2d": 0.5, "forward": 1.5, "backward": 2.000001}, slow=(2, "node-2", "forward", 0.01, 0.1, 0.009, 7, 1),
    )  # fmt: skip

    assert decode(encode(record)) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "null",
        "[2" + ",0" * 17 + "]",
        '"text"',
        "[" * 999,
        "x" * 5000,
        encode(report(0))[:-2],
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    """A rank of another version, or a key of another program, must not raise in the reader."""
    with pytest.raises(ValueError):  # noqa: PT011 - the text differs, the kind is the point
        decode(text)


@given(st.text(max_size=200) | st.from_regex(r"\[[0-9,.\"\[\]e-]{0,80}\]"))
def test_no_text_raises_anything_but_a_value_error(text: str) -> None:
    """The caller counts refusals; anything else would switch the exchange off."""
    with suppress(ValueError):
        decode(text)


def test_the_measured_steps_stand_for_all_on_the_device() -> None:
    """One step in two was measured; without a measured one there is no time, which is not a time of 0."""
    run = Run().feed(Tape().repeat(11, Tape.step)).account  # the last is not closed
    facts: dict[str, Any] = {"rank": 0, "host": "a", "barrier": "", "events": {}, "counted": {}}
    assert rank_report(run, **facts).device == {}

    stages = [(key.stage, key.phase) for key in run.totals.names.keys]
    run.totals.add_device(np.full(5, stages.index(("forward", "train"))), np.full(5, 4_000_000))

    assert rank_report(run, **facts).device == pytest.approx({"h2d": 0.0, "forward": 0.04, "backward": 0.0})
