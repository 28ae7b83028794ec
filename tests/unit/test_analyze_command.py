"""``otel-train analyze`` as its user meets it."""

from __future__ import annotations

import inspect
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

import otel_train
from otel_train.cli import arguments
from otel_train.cli.main import main
from otel_train.profiler.storage import together
from tests.support.made_trace import MadeTrace, training


def a_run(folder: Path, *, ranks: int = 1) -> Path:
    run = folder / "runs" / "20260131-x7"
    (run / "captures").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for rank in range(ranks):
        (run / f"rank{rank}").mkdir()
        made = training(steps=3, rank=rank, world_size=ranks)
        made.write(run / "captures" / f"epoch_1-rank{rank}.json.gz")
        (run / "captures" / f"epoch_1-rank{rank}.record.json").write_text("{}")
    return run


def test_it_says_what_a_trace_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Findings first, then the tables behind them."""
    path = training(steps=4).write(tmp_path / "trace.json")

    assert main(["analyze", str(path)]) == 0

    page = capsys.readouterr().out
    assert page.index("forward") > page.index("→")
    for part in ("4 steps", "device idle", "critical path", "aten::addmm", "memory cuda:0", "tensor cores"):
        assert part in page
    assert max(map(len, page.splitlines())) <= 100


def test_json_is_one_document_per_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read lines."""
    path = training(steps=2).write(tmp_path / "trace.json")

    assert main(["analyze", str(path), "--json", "--top", "2"]) == 0

    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == "otel_train.analysis/2"
    assert len(document["top_cpu_ops"]) == 2


def test_a_run_stands_for_its_newest_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks of it, so that waiting shows."""
    run = a_run(tmp_path, ranks=2)

    assert main(["analyze", str(run)]) == 0

    page = capsys.readouterr().out
    assert "of 2 ranks" in page
    assert "made wait" in page


def test_the_rank_may_be_in_the_name_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without torch.distributed the profiler does not know it."""
    made = MadeTrace(rank=None)
    made.op("aten::mm", 0, 5)

    assert main(["analyze", str(made.write(tmp_path / "epoch_1-rank3.json")), "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["rank"] == 3
    assert not any("which rank" in sentence for sentence in document["missing"])


def test_captures_of_one_moment_belong_together(tmp_path: Path) -> None:
    """Names differ in the rank alone."""
    names = ["epoch_1-rank0.json.gz", "epoch_1-rank10.json.gz", "epoch_2-rank0.json.gz"]
    paths = [tmp_path / name for name in names]

    assert together(paths, paths[0]) == paths[:2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.json"], "nothing.json: there is no such file"),
        (["nothing"], "neither a run directory nor"),
        (["one.json", "two.json"], "one.json: there is no such file"),
        (["bad.json"], "expected JSON"),
    ],
)
def test_what_cannot_be_analysed_is_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    """A traceback says nothing to whoever mistyped a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("hello")

    assert main(["analyze", *words]) == 2

    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


class Terminal(io.StringIO):
    """Takes what is written, as a terminal would."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words", [["analyze", "pipe"], ["compare", "pipe", "other.json"]])
def test_a_pipe_is_named_as_one(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`otel-train analyze <(zstd -dc trace.json.zst)` was said to be no run directory."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")

    assert main(words) == 2
    assert "pipe: is a pipe, a socket or a device. Write its content to a file" in capsys.readouterr().err


def test_a_large_file_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of silence look like a hang; a pipe and a small file need no line."""
    path = training(steps=1).write(tmp_path / "trace.json")
    stream = Terminal()

    assert arguments.progress(path, stream) is None
    monkeypatch.setattr(arguments, "LARGE_BYTES", 10)
    assert arguments.progress(path, io.StringIO()) is None
    show = arguments.progress(path, stream)
    assert show is not None
    show(50, 100)
    show(100, 100)

    assert "reading trace.json   50%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_shapes_of_an_operator_are_shown_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which sizes to pad is in the trace, if it was recorded."""
    path = training(steps=2).write(tmp_path / "trace.json")

    assert main(["analyze", str(path), "--shapes", "aten::addmm"]) == 0
    assert "aten::addmm [[128], [32, 64]" in capsys.readouterr().out


def test_every_public_name_of_the_package_is_a_function() -> None:
    """A module of the same name would take its place as soon as it is imported."""
    from otel_train.trace_analysis import __all__ as names

    assert all(inspect.isfunction(getattr(otel_train.trace_analysis, name)) for name in names)


def test_the_package_is_reached_by_its_full_name(tmp_path: Path) -> None:
    """``import otel_train`` is enough."""
    path = training(steps=2).write(tmp_path / "trace.json")

    assert otel_train.trace_analysis.trace_summary(path)["breakdown"]["steps"] == 2


def test_a_run_without_captures_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next question is how to get one."""
    run = a_run(tmp_path)
    for capture in (run / "captures").iterdir():
        capture.unlink()

    assert main(["analyze", str(run)]) == 2
    assert "has no captures" in capsys.readouterr().err
