"""Source numbers to names, and a bound on how many there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from otel_train.accounting.types import EVAL, TRAIN
from otel_train.aggregation.series_names import Key, SeriesNames
from otel_train.catalog import OTHER_VALUE
from otel_train.recording.events import Instrumented, SourceKind

MOST = 200
"""SeriesNames the bounds are tried with: more than any table takes."""


def names_of(*sources: Instrumented) -> SeriesNames:
    names = SeriesNames()
    names.learn(sources)
    return names


def keys(names: SeriesNames, owner: list[int], loader: list[int], phase: list[int]) -> list[Key]:
    series = names.series(np.array(owner), np.array(loader), np.array(phase))
    return [names.keys[number] for number in series.tolist()]


CODE = Instrumented(SourceKind.DATA, "code")
PROSE = Instrumented(SourceKind.DATA, "prose")
NET = Instrumented(SourceKind.FORWARD, "Net")


def test_sources_that_come_later_leave_the_old_ones_where_they_are() -> None:
    """Numbers were handed out already: a series must never change its meaning."""
    names = names_of(CODE, NET)
    before = keys(names, [1], [0], [TRAIN])
    names.learn((CODE, NET, PROSE))

    assert keys(names, [1], [0], [TRAIN]) == before
    assert keys(names, [2], [-1], [TRAIN]) == [Key("data", "prose", "train", "")]


def test_phases_are_read_from_the_user_and_from_the_name() -> None:
    """Both are hints that the account of a thread weighs."""
    columns = names_of(
        Instrumented(SourceKind.DATA, "a", "test"),
        Instrumented(SourceKind.DATA, "Validation"),
        Instrumented(SourceKind.FORWARD, "val_model"),
    ).table

    assert columns.declared == [2, -1, -1]
    assert columns.named == [-1, EVAL, -1]


@given(st.lists(st.sampled_from(range(MOST)), min_size=1, max_size=3 * MOST, unique=False))
def test_the_number_of_loader_names_is_bounded(numbers: list[int]) -> None:
    """A sweep that names a loader per trial must not cost memory and series without end."""
    names = SeriesNames()
    sources = list(dict.fromkeys(Instrumented(SourceKind.DATA, f"loader {n}") for n in numbers))
    names.learn(sources)

    assert len(names.loaders.names) <= 96
    overflown = {source.name for source in sources} - set(names.loaders.names)
    assert (OTHER_VALUE in names.loaders.names) == bool(overflown)
    for source in sources:
        place = int(names.loader(np.array([sources.index(source)]))[0])
        expected = OTHER_VALUE if source.name in overflown else source.name
        assert names.loaders.names[place] == expected


def test_stages_and_models_beyond_the_bound_share_a_name() -> None:
    """Every kind of name has its bound."""
    sources = [Instrumented(SourceKind.STAGE, f"stage {n}") for n in range(MOST)]
    sources += [Instrumented(SourceKind.FORWARD, f"model {n}") for n in range(MOST)]
    names = names_of(*sources)
    [stage] = keys(names, [MOST - 1], [-1], [TRAIN])
    [model] = keys(names, [2 * MOST - 1], [-1], [TRAIN])

    assert stage.stage == OTHER_VALUE
    assert model.model == OTHER_VALUE
    assert keys(names, [0], [-1], [TRAIN])[0].stage == "stage 0"
