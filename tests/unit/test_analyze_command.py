"""``otel-train analyze`` as its user meets it."""

from __future__ import annotations

import inspect
import io
import json
import os
import shlex
from pathlib import Path

import pytest

import otel_train
from otel_train.cli import arguments
from otel_train.profiler.storage import taken_together
from tests.support.command_line import Cli
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


def test_it_says_what_a_trace_says(tmp_path: Path, cli: Cli) -> None:
    """Findings first, then the tables behind them."""
    page = cli("analyze", training(steps=4).write(tmp_path / "trace.json")).printed

    assert page.index("forward") > page.index("→")
    for part in ("4 steps", "device idle", "critical path", "aten::addmm", "memory cuda:0", "tensor cores"):
        assert part in page
    assert max(map(len, page.splitlines())) <= 100


def test_a_file_that_is_no_trace_is_named_with_its_first_characters(tmp_path: Path, cli: Cli) -> None:
    """As text, not as Python writes bytes."""
    (tmp_path / "full.py").write_text("import sys, os")

    assert "starts with 'import sys, ': expected JSON" in cli("analyze", tmp_path / "full.py").refused


def test_json_is_one_document_per_trace(tmp_path: Path, cli: Cli) -> None:
    """Scripts read lines."""
    path = training(steps=2).write(tmp_path / "trace.json")
    document = json.loads(cli("analyze", path, "--json", "--top", "2").printed)

    assert document["schema"] == "otel_train.analysis/2"
    assert len(document["top_cpu_ops"]) == 2


def test_a_run_stands_for_its_newest_capture(tmp_path: Path, cli: Cli) -> None:
    """All ranks of it, so that waiting shows."""
    page = cli("analyze", a_run(tmp_path / "of me", ranks=3)).printed
    command = shlex.split(page.splitlines()[-1].partition(": otel-train ")[2])

    assert command[0] == "analyze"
    assert [Path(word).is_file() for word in command[1:]] == [True, True]
    assert "of 3 ranks" in page
    assert "made wait" in page


def test_the_rank_may_be_in_the_name_of_the_file(tmp_path: Path, cli: Cli) -> None:
    """Without torch.distributed the profiler does not know it."""
    made = MadeTrace(rank=None)
    made.op("aten::mm", 0, 5)
    document = json.loads(cli("analyze", made.write(tmp_path / "epoch_1-rank3.json"), "--json").printed)

    assert document["rank"] == 3
    assert not any("its rank" in sentence for sentence in document["missing"])


def test_captures_of_one_moment_belong_together(tmp_path: Path) -> None:
    """Names differ in the rank alone."""
    names = ["epoch_1-rank0.json.gz", "epoch_1-rank10.json.gz", "epoch_2-rank0.json.gz"]
    paths = [tmp_path / name for name in names]

    assert taken_together(paths, paths[0]) == paths[:2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("analyze nothing.json", "nothing.json: there is no such file"),
        ("analyze nothing", "neither a run directory nor"),
        ("analyze one.json two.json", "one.json: there is no such file"),
        ("analyze bad.json", "expected JSON"),
        # `otel-train analyze <(zstd -dc trace.json.zst)` was said to be no run directory.
        ("analyze pipe", "pipe: is a pipe, a socket or a device. Write its content to a file"),
        ("compare pipe other.json", "pipe: is a pipe, a socket or a device. Write its content to a file"),
    ],
)
def test_what_cannot_be_analysed_is_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, words: str, *, says: str
) -> None:
    """A traceback says nothing to whoever mistyped a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("hello")
    os.mkfifo("pipe")
    error = cli(*words.split()).refused

    assert says in error
    assert error.count("\n") == 1


class Terminal(io.StringIO):
    """Takes what is written, as a terminal would."""

    def isatty(self) -> bool:
        return True


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


def test_a_large_run_says_how_many_of_its_ranks_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand took minutes of silence; a pipe gets no line."""
    ranks, stream = range(1000), Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    found = arguments.in_processes(str, ranks)

    assert found == list(map(str, ranks))
    assert "read 1 of 1,000 ranks" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr("sys.stderr", piped := io.StringIO())
    assert arguments.in_processes(str, ranks) == found
    assert not piped.getvalue()


def test_shapes_of_an_operator_are_shown_on_demand(tmp_path: Path, cli: Cli) -> None:
    """Which sizes to pad is in the trace, if it was recorded."""
    path = training(steps=2).write(tmp_path / "trace.json")

    assert "aten::addmm [[128], [32, 64]" in cli("analyze", path, "--shapes", "aten::addmm").printed


def test_every_public_name_of_the_package_is_a_function() -> None:
    """A module of the same name would take its place as soon as it is imported."""
    from otel_train.trace_analysis import __all__ as names

    assert all(inspect.isfunction(getattr(otel_train.trace_analysis, name)) for name in names)


def test_the_package_is_reached_by_its_full_name(tmp_path: Path) -> None:
    """``import otel_train`` is enough."""
    path = training(steps=2).write(tmp_path / "trace.json")

    assert otel_train.trace_analysis.trace_summary(path)["breakdown"]["steps"] == 2


def test_a_run_without_captures_says_so(tmp_path: Path, cli: Cli) -> None:
    """The next question is how to get one."""
    run = a_run(tmp_path)
    for capture in (run / "captures").iterdir():
        capture.unlink()

    assert "has no captures" in cli("analyze", run).refused
