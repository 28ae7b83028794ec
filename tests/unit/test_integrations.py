"""What callbacks of libraries share: one session, names of loaders, epochs to profile. No library is needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import otel_train
from otel_train.errors import ConfigError
from otel_train.instrumentation.naming import role_of
from otel_train.integrations.lightning_support import (
    activities_of,
    chosen,
    common_run_id,
    fitted_schedule,
    steps_per_epoch,
)
from otel_train.integrations.shared_session import SharedSession, checked, merged, without_containers
from otel_train.trackers.metrics import left_out, without
from tests.support.store import FakeStore
from tests.support.zero_code import printed_by

LIBRARIES = ("accelerate", "fastai", "ignite", "lightning", "pytorch_lightning", "transformers")


class Holder:
    """Stands for a callback."""


class Trainer:
    """Stands for Lightning's, by its package and its name."""

    __module__ = "lightning.pytorch.trainer.trainer"


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a session that leaves nothing behind."""
    yield {
        "run_dir": str(tmp_path),
        "prometheus": False,
        "console": False,
        "otlp": "off",
        "flight_recorder": False,
    }
    session = otel_train.current()
    if session is not None:
        session.close()


# -- one session -----------------------------------------------------------------------------------


def test_the_last_who_leaves_closes_what_the_first_opened(quiet: dict[str, Any]) -> None:
    """Two callbacks of one Trainer are one session: nothing is timed twice, nothing ends too early."""
    shared, first, second = SharedSession(), Holder(), Holder()
    session = shared.join(first, quiet)

    assert shared.join(second, quiet) is session
    closed = []
    for holder in (first, first, second):
        shared.leave(holder)
        closed.append(session.closed)
    assert closed == [False, False, True]
    assert session.summary()["state"] == "finished"


def test_the_last_who_leaves_waits_for_nothing_while_the_run_lasts(quiet: dict[str, Any]) -> None:
    """An agent that is still starting is waited for when the run is over: that is no time of it."""
    shared, holder = SharedSession(), Holder()
    began_s = time.perf_counter()
    session = shared.join(holder, {**quiet, "agent": "process"})
    lasted_s = time.perf_counter() - began_s
    shared.leave(holder)

    assert session.summary()["wall_seconds"] < lasted_s + 0.2


def test_a_session_that_is_already_open_is_joined_and_left_open(quiet: dict[str, Any]) -> None:
    """A session that the program opens observes more than one fit."""
    shared, holder = SharedSession(), Holder()
    session = otel_train.instrument(**quiet)

    assert shared.join(holder, quiet) is session
    shared.leave(holder)
    assert not session.closed


@pytest.mark.parametrize(("given", "seen"), [(False, {"Linear": 2, "Bilinear": 1}), (True, {"model": 2})])
def test_a_callback_that_joins_finds_models_unless_some_were_given(
    quiet: dict[str, Any], given: bool, seen: dict[str, int]
) -> None:
    """``instrument(run_name=...)`` before ``fit`` is for several in one run: its models are found as if the callback had begun it."""
    model, other = torch.nn.Linear(4, 1), torch.nn.Bilinear(4, 4, 1)
    session = otel_train.instrument({"model": model} if given else None, **quiet)
    SharedSession().join(Holder(), quiet)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    other(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()
    session.close()

    forwards = {r["model"]: r["count"] for r in session.summary()["stages"] if r["stage"] == "forward"}
    assert forwards == seen


def test_a_run_that_failed_is_closed_as_failed(quiet: dict[str, Any]) -> None:
    """The callback gets the exception before the exit hook."""
    shared, holder = SharedSession(), Holder()
    session = shared.join(holder, quiet)
    shared.leave(holder, ArithmeticError("a loss that is none"))

    assert session.closed
    assert session.summary()["state"] == "failed"


def test_a_callback_can_train_again(quiet: dict[str, Any]) -> None:
    """A notebook fits twice: two runs."""
    shared, holder = SharedSession(), Holder()
    sessions = []
    for _ in range(2):
        sessions.append(shared.join(holder, quiet))
        shared.leave(holder)

    assert sessions[0] is not sessions[1]
    assert all(session.closed for session in sessions)
    assert shared.opened == 2


def test_settings_that_come_too_late_are_said(
    quiet: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A session that is open keeps its settings; who wrote others wants to know."""
    otel_train.instrument(**quiet)
    with caplog.at_level(logging.WARNING, "otel_train"):
        SharedSession().join(Holder(), {**quiet, "log_every_epochs": 3, "console_metrics": ["throughput"]})

    assert caplog.messages == [
        (
            "instrument(): a session is open; it keeps its settings, and those of this call have no effect (log_every_epochs). "
            "Set them in the first call, or close the session before"
        )
    ]


def test_disabled_is_disabled(quiet: dict[str, Any]) -> None:
    """``OTEL_TRAIN_DISABLED=true`` holds for callbacks, too."""
    shared, holder = SharedSession(), Holder()
    session = shared.join(holder, {**quiet, "disabled": True})
    session.show_blocks(["throughput"])
    shared.leave(holder)

    assert otel_train.current() is None
    assert session.epoch_captures().begin(1, {}) == "otel_train is disabled"


def test_a_model_that_was_not_named_is_found(quiet: dict[str, Any]) -> None:
    """A library calls parts of the model that it is given: what is called is what counts."""
    shared, holder = SharedSession(), Holder()
    session = shared.join(holder, quiet)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training_rows = DataLoader(torch.ones(12, 4), batch_size=4)
    for rows in training_rows:
        net(rows).sum().backward()
        optimizer.step()
    shared.leave(holder)

    summary = session.summary()
    assert summary["steps"] == {"train": 3}
    assert summary["batches"] == {"training_rows": 3}
    assert [row["count"] for row in summary["stages"] if row["stage"] == "forward"] == [3]


# -- settings --------------------------------------------------------------------------------------


def test_settings_of_a_configuration_library_become_python_s_own() -> None:
    """Hydra's lists and dicts are no list and no dict."""
    given = {"wandb": {"project": "mine"}, "console_metrics": range(2), "run_name": "x"}

    assert without_containers(given) == {
        "wandb": {"project": "mine"},
        "console_metrics": [0, 1],
        "run_name": "x",
    }


def test_a_wrong_setting_is_refused_where_the_callback_is_made() -> None:
    """Not hours later, when training begins."""
    with pytest.raises(ConfigError, match="Did you mean run_name"):
        checked({"run_nam": "x"})


def test_blocks_of_several_callbacks_add_up() -> None:
    """Else the last callback's would be the only ones."""
    one = {"console_metrics": ["throughput"], "run_name": "a"}
    other = {"console_metrics": "profiling", "run_name": "b"}

    assert merged([one, other]) == {"console_metrics": ["throughput", "profiling"], "run_name": "b"}


def test_parts_of_an_epoch_s_throughput_can_be_left_out() -> None:
    """``track_memory=False``, ``track_timing=False``: also of each loader, and of nothing else."""
    values = {
        "samples_per_second": 1.0,
        "memory_peak_mb": 2.0,
        "batch_load_time_ms_avg": 3.0,
        "dl_a/batch_transform_time_ms_p95": 4.0,
    }

    assert left_out("timing,memory") == ()
    assert set(without(values, left_out("timing"))) == set(values) - {"memory_peak_mb"}
    assert without(values, left_out("none")) == {"samples_per_second": 1.0}


# -- epochs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "epochs"),
    [(None, {1}), ([], {1}), (2, {2}), ([1, 3], {1, 3}), ((4,), {4}), (range(1, 3), {1, 2})],
)
def test_epochs_come_as_a_number_or_as_any_sequence(given: Any, epochs: set[int]) -> None:
    """None of them: the first."""
    assert chosen(given) == epochs


@pytest.mark.parametrize("given", [0, [0], [1, -2], [True], ["1"], 1.5])
def test_an_epoch_that_is_none_is_refused(given: Any) -> None:
    """They count from 1, where the Trainer's count from 0: a slip that would profile nothing."""
    with pytest.raises(ConfigError, match=r"is not an epoch\. They count from 1: for the first write"):
        chosen(given)


@pytest.mark.parametrize(
    ("given", "names"),
    [("cpu", ("cpu",)), (["CPU", "cuda"], ("cpu", "cuda")), ({"ProfilerActivity.CPU"}, ("cpu",))],
)
def test_activities_come_as_words_or_as_torch_has_them(given: Any, names: Sequence[str]) -> None:
    """The earlier callback took either."""
    assert activities_of(given) == names


@pytest.mark.parametrize("given", ["gpu", ["cpu", "disk"], [], 3])
def test_an_unknown_activity_is_refused(given: Any) -> None:
    """Else nothing would be recorded, without a reason."""
    with pytest.raises(ConfigError, match="expected some of cpu, cuda, xpu, mtia"):
        activities_of(given)


@pytest.mark.parametrize(
    ("steps", "plan"),
    [
        (None, (15, 5, 100)),
        (1000, (15, 5, 100)),
        (120, (15, 5, 100)),
        (110, (5, 5, 100)),
        (50, (0, 5, 45)),
        (21, (0, 5, 16)),
        (20, (0, 5, 15)),
        (8, (0, 4, 4)),
        (1, (0, 0, 1)),
    ],
)
def test_an_epoch_too_short_for_the_schedule_is_recorded_all_the_same(
    steps: int | None, plan: tuple[int, int, int]
) -> None:
    """Skip 10, wait 5, warm up: a small epoch would have nothing left."""
    assert fitted_schedule(steps, warmup=5, active=100) == plan


def test_accumulated_batches_make_one_step() -> None:
    """The last, smaller group is a step, too; a stream has no number of them."""
    batches = ((9, 2), (9, 1), (float("inf"), 2))

    assert [steps_per_epoch(count, accumulated) for count, accumulated in batches] == [5, 9, None]


# -- loaders ---------------------------------------------------------------------------------------


def test_loaders_are_called_by_what_they_are_for() -> None:
    """The variable that a library holds them in is called ``data_fetcher``."""
    one, code, prose, val, again, test, other = (DataLoader([number]) for number in range(7))
    trainer: Any = Trainer()
    trainer.train_dataloader = {"code": code, "more": [prose]}
    trainer.val_dataloaders, trainer.test_dataloaders = [val, one], test
    trainer.validate_loop = SimpleNamespace(_combined_loader=SimpleNamespace(iterables=again))

    assert [role_of(trainer, [loader]) for loader in (code, prose, val, one, again, test, other)] == [
        "code", "more_0", "val_0", "val_1", "val", "test", "",
    ]  # fmt: skip
    trainer.train_dataloader = one
    assert role_of(trainer, [one]) == "train"
    assert role_of(Holder(), [one]) == ""


def test_a_loader_that_the_trainer_does_not_know_is_that_of_the_stage_that_runs() -> None:
    """Whatever stands for the loader in the library: not so where the program's own code iterates."""
    trainer: Any = Trainer()
    trainer.sanity_checking = trainer.predicting = False
    trainer.testing = True

    assert role_of(trainer, [DataLoader([1])], alone=True) == "test"
    assert role_of(trainer, [DataLoader([1])]) == ""
    trainer.sanity_checking = True
    assert role_of(trainer, [DataLoader([1])], alone=True) == "val"


# -- ranks -----------------------------------------------------------------------------------------


def meet(rank: int, store: Any, number: int = 0, environ: dict[str, str] | None = None) -> str:
    return common_run_id(
        number, environ=environ or {}, ranks=lambda: (rank, 2), store=lambda: store, patience_s=0.1
    )


def test_all_ranks_of_a_job_get_the_id_of_its_first() -> None:
    """A process that starts the others gives them no id, and their parents differ."""
    store = FakeStore()
    first = meet(0, store)

    assert meet(1, store) == first != ""
    assert meet(0, store, number=1) != first


def test_who_cannot_meet_has_a_run_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that never comes does not keep the others from training."""
    assert meet(1, FakeStore()) == ""
    assert meet(1, None) == ""
    assert "rank 0 named no run within 0.1 s" in caplog.text


def test_an_id_that_ranks_have_in_common_already_is_theirs() -> None:
    """A launcher, a scheduler or W&B has given it."""
    for name in ("TORCHELASTIC_RUN_ID", "OTEL_TRAIN_LAUNCH_RUN"):
        assert meet(0, FakeStore(), environ={name: "mine"}) == ""
    assert common_run_id(0, environ={}, ranks=lambda: None) == ""


# -- imports ---------------------------------------------------------------------------------------


def test_no_library_is_imported_but_by_its_own_module() -> None:
    """``import otel_train`` costs milliseconds, with or without them installed."""
    program = (
        "import sys, otel_train, otel_train.api, otel_train.integrations.shared_session, otel_train.cli.main\n"
        f"print([name for name in {LIBRARIES} if name in sys.modules])"
    )

    assert printed_by("-c", program) == "[]\n"
