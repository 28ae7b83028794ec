"""What frameworks save is a checkpoint; their modules are fakes here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from otel_train.instrumentation.checkpoints import CheckpointProbe
from tests.support.written import Writer

SAVED = [("BEGIN", "checkpoint", 0), ("END", "checkpoint", 0)]


class Trainer:
    """The part of a framework's trainer that saves."""

    def save_checkpoint(self, path: str) -> str:
        """Saves."""
        if not path:
            raise OSError("no space left")
        return f"saved {path}"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[Trainer]:
    """A class of its own for each test, in a module that the program has imported."""
    made = type("Trainer", (Trainer,), {"save_checkpoint": Trainer.save_checkpoint})
    monkeypatch.setitem(sys.modules, "pytorch_lightning.trainer.trainer", SimpleNamespace(Trainer=made))
    return made


def test_what_a_framework_saves_is_a_checkpoint(writer: Writer, trainer: type[Trainer]) -> None:
    """Result and exception are its own, and a failure is a failed checkpoint."""
    probe = CheckpointProbe()
    probe.watch()

    assert trainer().save_checkpoint("a") == "saved a"
    with pytest.raises(OSError, match="no space left"):
        trainer().save_checkpoint("")
    assert writer.edges == [*SAVED, ("BEGIN", "checkpoint", 0), ("FAIL", "checkpoint", 0)]
    probe.remove()


def test_a_framework_that_is_imported_later_is_found_and_nothing_is_timed_twice(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``watch`` is called again and again."""
    probe = CheckpointProbe()
    probe.watch()
    late: Any = SimpleNamespace(Fabric=type("Fabric", (), {"save": lambda *_: None}))
    monkeypatch.setitem(sys.modules, "lightning_fabric.fabric", late)
    probe.watch()
    probe.watch()

    late.Fabric().save()
    assert writer.edges == SAVED
    probe.remove()


def test_a_framework_saves_as_before_once_the_probe_is_removed(
    writer: Writer, trainer: type[Trainer]
) -> None:
    """The function is put back, unless other code has wrapped it; then it passes every call on."""
    before = vars(trainer)["save_checkpoint"]
    probe = CheckpointProbe()
    probe.watch()
    timed = vars(trainer)["save_checkpoint"]
    probe.remove()
    assert vars(trainer)["save_checkpoint"] is before

    probe.watch()
    other: Any = str
    trainer.save_checkpoint = other  # type: ignore[method-assign]  # as another tool does
    probe.remove()
    assert vars(trainer)["save_checkpoint"] is other
    with writer.active():
        assert timed(trainer(), "a") == "saved a"


@pytest.mark.filterwarnings("ignore")  # torch warns of its own use of itself
def test_what_distributed_checkpoint_saves_is_a_checkpoint(writer: Writer, tmp_path: Path) -> None:
    """A function of a package, which sharded training calls; here without a process group."""
    import torch.distributed.checkpoint as package

    probe = CheckpointProbe()
    probe.watch()
    package.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    probe.remove()
    package.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)

    assert writer.edges == SAVED
    assert (tmp_path / ".metadata").exists()


def test_a_version_without_the_function_is_left_alone(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private function may go, or a class be renamed."""
    for content in ({}, {"Trainer": type("Trainer", (), {})}, {"Trainer": None}):
        monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(**content))
        CheckpointProbe().watch()
    assert writer.edges == []
