"""What a rank says of itself: small, ASCII, and the same on both ends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.catalog import PHASES, RANK_EVENT, STAGES
from otel_train.distributed.rank_report import COUNTED, MOST_CHARS, NAMED, RankReport, decode, encode
from tests.support.rank_reports import report

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
