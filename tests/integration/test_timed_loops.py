"""How long a loop says that it slept is what the summary says, whatever the shape of the loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.loops.truth import LOOPS, TIMED, TRAIN, Slow, Truth, Watch, sgd, slow_loader
from tests.integration.test_loops import expected, found, row, run
from tests.support.loop_table import check_row
from tests.support.summary_laws import laws_of
from tests.support.times_of_loops import times_of


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first session of a process imports what the others find."""
    run("plain", tmp_path_factory.mktemp("warm"), sleeps=True)


@pytest.mark.parametrize("name", TIMED)
def test_a_loop_is_counted_and_timed_as_it_times_itself(name: str, tmp_path: Path) -> None:
    """Counts can be right and times wrong: rates, findings and advice all come from times."""
    truth, watch = run(name, tmp_path, sleeps=True)
    summary = watch.sessions[-1].summary()

    wrong = [] if (seen := found(summary, truth)) == (said := expected(truth)) else [f"{seen} is not {said}"]
    wrong += laws_of(summary)
    wrong += times_of(summary, truth, watch)
    assert not wrong, "\n".join(wrong)
    check_row("loops", name, {**row(truth, summary, LOOPS[name]), "timed": True})


def test_trainings_one_after_the_other_keep_their_own_times(tmp_path: Path) -> None:
    """Two trainings in one process are two runs: neither has the other's counts, times or file."""
    seen: list[tuple[Truth, Watch, dict[str, Any]]] = []
    for batches, pause_s in ((4, 0.15), (7, 0.0)):
        watch = Watch(tmp_path, sleeps=True)
        truth = watch.truth(rated={"train": TRAIN})
        model, train = Slow(truth), slow_loader(truth, "train", batches)
        optimizer = sgd(model)
        watch(model, {"train": train})
        truth.train_on(model, optimizer, train)
        truth.sleep(pause_s, "outside")
        watch.close()
        seen.append((truth, watch, watch.sessions[0].summary()))
        time.sleep(0.1)  # of neither

    for truth, watch, summary in seen:
        assert found(summary, truth) == expected(truth)
        assert times_of(summary, truth, watch) == []
        assert laws_of(summary) == []
    assert len({summary["run_id"] for _, _, summary in seen}) == 2
    assert len(list(tmp_path.glob("*/rank0/summary.json"))) == 2
