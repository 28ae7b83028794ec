"""Exporters of other packages: found, fed, and kept from doing harm."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from otel_train.api import instrument
from otel_train.config import Config
from otel_train.datamodel import Event, ExportBatch
from otel_train.errors import ConfigError
from otel_train.exporters.plugins import GROUP, MOST_WAITING, load_plugins
from otel_train.testing import Kept

RESOURCE = {"train.rank": 3}
EVENT = ExportBatch(events=(Event(name="x", time_unix_ns=1),))
FINAL = ExportBatch(final=True)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A third-party package, which is installed."""
    module = ModuleType("theirs")
    monkeypatch.setitem(sys.modules, "theirs", module)
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "mine")
    return module


def install(folder: Path, *names: str) -> None:
    """What an installer writes of a package with exporters of these names."""
    installed = folder / "theirs-1.0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "".join(f"{name} = theirs:{name}\n" for name in names)
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")


def bring(package: ModuleType, make: Callable[[Mapping[str, Any]], Any], wish: str = "auto") -> list[Any]:
    package.__dict__["mine"] = make
    return load_plugins(wish, RESOURCE, timeout_s=1.5)


def test_an_installed_exporter_gets_every_batch_in_order_and_is_closed(package: ModuleType) -> None:
    """The ordinary case, on a thread that is not the export loop's."""
    kept, threads = Kept(), set()
    received: list[object] = []

    class Theirs:
        def __init__(self, resource: Mapping[str, Any]) -> None:
            received.append(resource)

        def export(self, batch: ExportBatch) -> None:
            threads.add(threading.current_thread().name)
            kept.export(batch)

        def close(self, timeout_s: float) -> None:
            received.append(timeout_s)

    (one,) = bring(package, Theirs)
    one.export(EVENT)
    one.export(FINAL)
    one.close(30)

    assert kept.batches == [EVENT, FINAL]
    assert threads == {"otel-train-exporter mine"}
    assert received == [RESOURCE, 1.5]


def test_an_exporter_may_decline(package: ModuleType) -> None:
    """One that sends for rank 0 alone gives None elsewhere."""
    assert bring(package, lambda _: None) == []


def test_off_and_names_choose_among_what_is_installed(package: ModuleType, tmp_path: Path) -> None:
    """A package that came as a dependency must not send by itself where its user says no."""
    package.__dict__.update(a=lambda _: Kept(), b=lambda _: Kept())
    install(tmp_path, "a", "b")

    def names(wish: str) -> list[str]:
        return [one.guard.part for one in load_plugins(wish, RESOURCE, timeout_s=1)]

    assert names("auto") == ["exporter a", "exporter b"]
    assert names("off") == []
    assert names("b, b") == ["exporter b"]


def test_an_exporter_that_raises_is_said_once_counted_and_off_after_three(
    package: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is gone must not fill the log for a week."""

    class Fails(Kept):
        def export(self, batch: ExportBatch) -> None:
            super().export(batch)
            raise ConnectionError("gone")

    theirs = Fails()
    (one,) = bring(package, lambda _: theirs)
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(10):
            one.export(EVENT)
        one.close(30)

    assert len(theirs.batches) == one.guard.faults == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert theirs.closed


def test_an_exporter_that_hangs_does_not_block(package: ModuleType) -> None:
    """What it does not take in time is dropped and counted, and the end does not wait for it."""
    freed, began = threading.Event(), threading.Event()

    class Hangs(Kept):
        def export(self, batch: ExportBatch) -> None:
            began.set()
            freed.wait(60)

    (one,) = bring(package, lambda _: Hangs())
    one.export(EVENT)
    assert began.wait(30)
    for _ in range(MOST_WAITING + 5):
        one.export(EVENT)
    begun = time.monotonic()
    one.close(0.05)
    waited_s = time.monotonic() - begun
    freed.set()

    assert one.dropped == 1 + 5 + MOST_WAITING
    assert waited_s < 30


def test_one_that_was_found_and_fails_to_load_is_left_out(
    package: ModuleType, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No setting names it: the run starts without it, and says so."""
    package.__dict__["good"] = lambda _: Kept()
    install(tmp_path, "bad", "good")

    with caplog.at_level(logging.WARNING, "otel_train"):
        made = load_plugins("auto", RESOURCE, timeout_s=1)

    assert [one.guard.part for one in made] == ["exporter good"]
    assert "exporter bad failed; training goes on without it" in caplog.text


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (
            "mien",
            f"exporters='mien': expected the name of an installed entry point {GROUP}. Did you mean mine?",
        ),
        ("else", f"exporters='else': expected the name of an installed entry point {GROUP}. Installed: mine"),
        ("mine", "exporters='mine': theirs:mine cannot be made: KeyError: 'x'. Correct it, or leave it out"),
    ],
)
def test_one_that_was_asked_for_and_cannot_be_had_is_refused(
    package: ModuleType, wish: str, said: str
) -> None:
    """Asked for by name, it is there or the run says why not."""

    def make(resource: Mapping[str, Any]) -> None:
        raise KeyError("x")

    with pytest.raises(ConfigError) as caught:
        bring(package, make, wish)

    assert str(caught.value) == said


def test_something_that_is_no_exporter_is_refused(package: ModuleType) -> None:
    """An object without ``close`` would fail at the very end."""
    with pytest.raises(ConfigError, match=r"expected export\(batch\) and close\(timeout_s\), or None"):
        bring(package, lambda _: object(), "mine")


def test_a_list_of_names_may_be_given_in_code() -> None:
    """As for other settings that name several things."""
    names: Any = ["a", "b"]

    assert Config(exporters=names).exporters == "a,b"


def test_a_session_refuses_an_exporter_that_is_not_there(tmp_path: Path) -> None:
    """At set-up, while its user is still looking; nothing is left open."""
    with pytest.raises(ConfigError, match="exporters='nowhere'"):
        instrument(run_dir=tmp_path, exporters="nowhere", prometheus=False)
