"""Time that the compiler takes, separate from training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import otel_train


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch._dynamo.reset()


def train(model: torch.nn.Module, sizes: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for size in sizes:
        optimizer.zero_grad()
        model(torch.ones(size, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("late", [False, True], ids=["compiled before", "compiled after"])
def test_a_compiled_model_shows_what_compiling_took(tmp_path: Path, *, late: bool) -> None:
    """A run that spends its first minutes compiling says so, and the ledger still adds up."""
    model = torch.nn.Linear(4, 4)
    looped = model if late else torch.compile(model, backend="aot_eager")
    with otel_train.instrument(looped, run_dir=str(tmp_path), console=False, prometheus=False) as session:
        if late:
            looped = torch.compile(model, backend="aot_eager")
        train(looped, [2, 2, 3, 4])
    activities = session.summary()["activities"]
    assert activities["compile"] > activities["productive"] > 0
    assert sum(activities.values()) == pytest.approx(session.summary()["wall_seconds"])


def test_a_compiled_model_trains_where_callbacks_take_no_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is in torch 2.4 to 2.7, where the first forward ended with a TypeError in otel_train."""
    handler = type(torch._dynamo.callback.callback_handler)
    monkeypatch.setattr(
        handler, "run_start_callbacks", lambda self, _: [tell() for tell in self.start_callbacks]
    )
    monkeypatch.setattr(handler, "run_end_callbacks", lambda self, _: [tell() for tell in self.end_callbacks])
    model = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
    with otel_train.instrument(model, run_dir=str(tmp_path), console=False, prometheus=False) as session:
        train(model, [2, 2, 3, 4])
    summary = session.summary()

    assert summary["updates"] == 4
    assert summary["activities"]["compile"] > 0
    events = next(tmp_path.rglob("events.jsonl")).read_text(encoding="utf-8")
    assert events.count('"train.recompile"') == 1


def test_no_callback_stays_in_the_compiler(tmp_path: Path) -> None:
    """After close the compiler calls no callback."""
    handler = torch._dynamo.callback.callback_handler
    with otel_train.instrument(torch.nn.Linear(4, 4), run_dir=str(tmp_path), console=False, prometheus=False):
        assert len(handler.start_callbacks) == 1
    assert not handler.start_callbacks
    assert not handler.end_callbacks
