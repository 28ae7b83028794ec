"""The artifacts of a run: what they say, what they refuse, what they never touch."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it publishes no types
import pytest

from otel_train.artifacts.writer import MOST_STEPS, write
from otel_train.cli.main import main
from otel_train.errors import RunDirectoryError
from otel_train.files import MOST_JSON_BYTES, replace_json
from otel_train.rundata.run import read_run
from tests.support.command_line import Cli
from tests.support.left_run import STAGES_MS, STEP_S, TOKEN, leave_run, say_summary
from tests.support.made_trace import training
from tests.support.zero_code import printed_by

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "otel_train/rundata/artifacts.schema.json").read_text(encoding="utf-8")
)
WITHOUT_RIGHTS = 65_534
DOCUMENTS = {
    "config.json": "config",
    "metrics.json": "metrics",
    "profiler_summary.json": "profiler_summary",
    "stage_times.json": "stage_times",
    "profiler_context/stage_times.json": "by_stage",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of a process that was killed in its third epoch."""
    return leave_run(tmp_path / "runs", (3, 2))


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def put_capture(run: Path, name: str = "epoch_1-step_2-rank0.json.gz", *, torn: bool = False) -> Path:
    (run / "captures").mkdir(exist_ok=True)
    path = training(steps=3).write(run / "captures" / name)
    if torn:
        whole = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        path.write_bytes(gzip.compress(whole[: len(whole) // 2]))
    return path


def test_every_document_is_as_its_schema_says(run: Path) -> None:
    """The schema is what other people's programs are written against."""
    put_capture(run)
    folder = write(run, 0).folder

    for name, definition in DOCUMENTS.items():
        of_one = {**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{definition}"}]}
        jsonschema.Draft202012Validator(of_one).validate(read(folder, name))


def test_steps_epochs_and_totals_are_those_of_the_flight_file(run: Path) -> None:
    """Values that can be verified mentally: 10 ms per step, of which 2 in no stage."""
    times = read(write(run, 0).folder, "stage_times.json")

    assert [row["step"] for row in times["per_step"]] == list(range(5))
    assert [(row["epoch"], row["steps"], row["whole"]) for row in times["per_epoch"]] == [
        (1, 3, True),
        (2, 2, True),
    ]
    for row in times["per_step"][1:-1]:
        assert row["seconds"] == pytest.approx(STEP_S)
        assert row["stages"] == pytest.approx(
            {**{name: ms / 1e3 for name, ms in STAGES_MS.items()}, "other": 0.002}
        )
    counts = {row["stage"]: row["count"] for row in times["totals"] if row["phase"] == "train"}
    assert (counts["forward"], counts["backward"], counts["optimizer"], counts["other"]) == (5, 5, 5, None)
    assert times["totals_from"] == "flight.bin"


def test_epochs_that_the_program_marks_have_its_numbers(tmp_path: Path) -> None:
    """Also where the file no longer holds the first ones."""
    run = leave_run(tmp_path, (1000, 20, 5), edges=1 << 12, marked_from=4)

    times = read(write(run, 0).folder, "stage_times.json")

    assert [(row["epoch"], row["whole"]) for row in times["per_epoch"]] == [(4, False), (5, True), (6, True)]
    assert [row["steps"] for row in times["per_epoch"]][1:] == [20, 5]
    assert times["epochs_of"] == ""


def test_a_run_that_ended_has_the_totals_of_its_summary(run: Path) -> None:
    """That counts from the start of the process, however long ago."""
    say_summary(run, steps={"train": 700})

    folder = write(run, 0).folder

    assert read(folder, "stage_times.json")["totals_from"] == "summary.json"
    assert read(folder, "profiler_summary.json")["ended"] is True
    assert read(folder, "profiler_context/stage_times.json")["stages"]["backward"][
        "total_seconds"
    ] == pytest.approx(0.02)


def test_of_many_steps_the_last_ten_thousand_are_written_one_by_one(tmp_path: Path) -> None:
    """A file that grows with the run would one day be too large to open."""
    run = leave_run(tmp_path, (MOST_STEPS + 50,), edges=1 << 17)

    times = read(write(run, 0).folder, "stage_times.json")

    assert [times["per_step"][0]["step"], times["per_step"][-1]["step"]] == [50, MOST_STEPS + 49]
    assert times["per_epoch"][0]["steps"] == MOST_STEPS + 50


def test_steps_that_are_no_longer_on_file_are_numbered_from_the_summary(tmp_path: Path) -> None:
    """A ring forgets: the first row must not be called step 0."""
    run = leave_run(tmp_path, (1000, 20), edges=1 << 12)
    say_summary(run, steps={"train": 1020}, loaders=[{"loader": "code", "endings": {"epoch_end": 2}}])

    times = read(write(run, 0).folder, "stage_times.json")

    assert times["per_step"][-1]["step"] == 1019
    assert times["whole"] is False
    assert [(row["epoch"], row["whole"]) for row in times["per_epoch"]] == [(1, False), (2, True)]


def test_without_a_capture_the_trace_is_made_from_the_last_steps(run: Path) -> None:
    """The system before this one never had a trace.json that opened."""
    written = write(run, 0)
    trace = read(written.folder, "trace.json")

    assert trace["otel_train"]["source"] == "stages"
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(5)]
    inside = [event for event in spans if event["name"] == "backward"]
    assert [event["dur"] for event in inside] == [4000.0] * 5
    assert "capture" in written.files["op_stats.csv"]["absent"]
    assert not (written.folder / "op_stats.csv").exists()


def test_the_newest_capture_gives_trace_and_operators(run: Path) -> None:
    """Event for event what the profiler wrote, and a table that adds up to one."""
    capture = put_capture(run)
    folder = write(run, 0).folder

    trace = read(folder, "trace.json")
    rows = list(csv.DictReader((folder / "op_stats.csv").read_text(encoding="utf-8").splitlines()))

    plain = capture.read_bytes()
    original = json.loads(gzip.decompress(plain) if plain[:2] == b"\x1f\x8b" else plain)
    assert trace["otel_train"] == {"source": "capture", "capture": capture.name}
    assert trace["traceEvents"] == original["traceEvents"]
    shares = sum(float(row["share"]) for row in rows if row["kind"] == "operator")
    assert shares == pytest.approx(1.0)
    assert (folder / "torch_profiler" / capture.name).read_bytes() == plain


def test_a_torn_capture_gives_way_to_the_one_before_it(run: Path) -> None:
    """The disk was full; what was captured earlier is still good."""
    good = put_capture(run, "epoch_1-step_2-rank0.json.gz")
    torn = put_capture(run, "epoch_1-step_9-rank0.json.gz", torn=True)
    os.utime(good, (1, 1))

    written = write(run, 0)

    assert read(written.folder, "trace.json")["otel_train"]["capture"] == good.name
    assert any(torn.name in warning for warning in written.warnings)


def test_a_capture_that_no_viewer_opens_is_not_copied(run: Path) -> None:
    """One of a hole of 4 GiB would fill the disk."""
    path = put_capture(run)
    os.truncate(path, 4 << 30)

    written = write(run, 0)

    assert not (written.folder / "torch_profiler" / path.name).exists()
    assert f"{path.name} has 4,294,967,296 bytes, more than 2 GiB: it is not copied." in written.warnings


def test_lines_of_a_file_larger_than_a_run_writes_are_not_checked_and_that_is_said(
    run: Path, cli: Cli
) -> None:
    """Ten gigabytes took half a minute."""
    say_summary(run)
    (run / "rank0/events.jsonl").touch()
    os.truncate(run / "rank0/events.jsonl", 2 << 30)

    _, out, _ = cli("validate", run)

    what = "has 2,147,483,648 bytes, more than a run writes (1,073,741,824): its lines were not checked"
    assert f"rank0/events.jsonl: {what}" in out


def test_captures_of_other_ranks_and_links_are_left_alone(run: Path, tmp_path: Path) -> None:
    """A link could lead to anything that the reader may read."""
    put_capture(run, "epoch_1-step_2-rank1.json.gz")
    secret = tmp_path / "secret.json"
    secret.write_text('{"traceEvents": [], "secret": 1}')
    (run / "captures" / "epoch_1-step_3-rank0.json.gz").symlink_to(secret)

    written = write(run, 0)

    assert "absent" in written.files["torch_profiler"]
    assert any("a link" in warning for warning in written.warnings)
    assert not list(written.folder.glob("torch_profiler/*"))


def test_what_opens_doors_is_not_passed_on(run: Path) -> None:
    """Artifacts are sent to colleagues; the token of POST /capture must not be among them."""
    folder = write(run, 0).folder

    assert read(folder, "config.json")["settings"]["profiler_token"] == "(set)"
    assert not [
        path for path in folder.rglob("*") if path.is_file() and TOKEN in path.read_text(encoding="utf-8")
    ]


def test_folders_that_we_create_ignore_themselves_in_git(run: Path, tmp_path: Path) -> None:
    """A trace of 20 MB is easily committed, and hard to take back."""
    made = write(run, 0, tmp_path / "made").folder
    (tmp_path / "theirs").mkdir()
    theirs = write(run, 0, tmp_path / "theirs").folder

    assert (made / ".gitignore").read_text() == "*\n"
    assert not (theirs / ".gitignore").exists()


def test_foreign_files_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    """config.json is a name that every project has."""
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(RunDirectoryError, match=r"config\.json that otel-train did not write"):
        write(run, 0, tmp_path)

    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_link_in_the_run_directory_is_not_written_through(run: Path, tmp_path: Path) -> None:
    """A run directory from elsewhere could point at the home of any user."""
    (tmp_path / "home").mkdir()
    (run / "artifacts").symlink_to(tmp_path / "home")

    with pytest.raises(RunDirectoryError, match="is a link"):
        write(run, 0)

    assert list((tmp_path / "home").iterdir()) == []


def test_a_second_writing_replaces_the_first(run: Path) -> None:
    """A live run is looked at again and again; what is no longer true must go."""
    capture = put_capture(run)
    write(run, 0)
    capture.unlink()

    written = write(run, 0)

    assert read(written.folder, "trace.json")["otel_train"]["source"] == "stages"
    assert not (written.folder / "op_stats.csv").exists()
    assert main(["validate", str(written.folder)]) == 0


def _without_flight(run: Path) -> Path:
    (run / "rank0" / "flight.bin").unlink()
    return run / "rank0"


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_JSON_BYTES + 1)


SPOILED: dict[str, Callable[[Path], object]] = {
    "no rank": lambda run: _without_flight(run).rmdir(),
    "linked rank": lambda run: (run / "rank0").symlink_to((run / "rank0").rename(run / "elsewhere")),
    "torn flight file": lambda run: (run / "rank0" / "flight.bin").write_bytes(b"OTELTRN1"),
    "foreign flight file": lambda run: (run / "rank0" / "flight.bin").write_bytes(b"PK" * 200_000),
    "pipe for a flight file": lambda run: os.mkfifo(_without_flight(run) / "flight.bin"),
    "only a huge summary": lambda run: _huge(_without_flight(run) / "summary.json"),
    "only a foreign summary": lambda run: say_summary(_without_flight(run).parent, schema="another.tool/7"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_run_that_nothing_can_be_made_of_is_refused_and_left_as_it_is(
    run: Path, spoil: Any, cli: Cli
) -> None:
    """One line that says what was looked for, exit code 2, and no half-made folder."""
    spoil(run)
    before = sorted(run.rglob("*"))
    said = cli("export", run).refused

    assert "Traceback" not in said
    assert said.count("\n") == 1
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    "text", ['{"schema": "otel_tr', "[1]", "[" * 100_000, '{"schema": "another.tool/7"}', "\x00"]
)
def test_a_summary_that_cannot_be_read_is_said_and_done_without(run: Path, text: str) -> None:
    """The flight file has the steps all the same."""
    (run / "rank0" / "summary.json").write_text(text, encoding="utf-8")

    written = write(run, 0)

    assert any("summary.json" in warning for warning in written.warnings)
    assert len(read(written.folder, "stage_times.json")["per_step"]) == 5
    assert main(["validate", str(written.folder)]) == 0
    assert main(["validate", str(run)]) == 1


def test_a_summary_of_an_earlier_start_is_not_taken_for_this_one(run: Path) -> None:
    """Killed right after a restart, a rank has not written one of its own yet."""
    say_summary(run)
    (run / "rank0" / "attempt").write_text("1\n")

    written = write(run, 0)

    assert read(written.folder, "profiler_summary.json")["ended"] is False


@pytest.mark.parametrize("value", ["x", None, [], {}, float("nan"), -1, 10**400])
@pytest.mark.parametrize("key", ["stages", "steps", "loaders", "activities", "run_id"])
def test_a_value_of_the_wrong_shape_does_no_harm(run: Path, key: str, value: Any) -> None:
    """It was edited, or a later version wrote it."""
    say_summary(run, **{key: value})

    folder = write(run, 0).folder

    assert main(["validate", str(folder)]) in (0, 1)
    assert main(["validate", str(run), "--analysis", "--report"]) in (0, 1)


def _edited(name: str, change: Any) -> Any:
    def edit(folder: Path) -> None:
        document = read(folder, name)
        change(document)
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
        summary = read(folder, "profiler_summary.json")  # its size is accounted for: the fault is inside
        summary["artifacts"][name] = {"bytes": (folder / name).stat().st_size}
        (folder / "profiler_summary.json").write_text(json.dumps(summary), encoding="utf-8")

    return edit


def _path_among_captures(folder: Path) -> None:
    summary = read(folder, "profiler_summary.json")
    summary["artifacts"]["torch_profiler"] = {"files": ["../../../../etc/passwd"]}
    (folder / "profiler_summary.json").write_text(json.dumps(summary), encoding="utf-8")


TAMPERED = {
    "deleted": ("metrics.json", lambda folder: (folder / "metrics.json").unlink()),
    "torn": ("stage_times.json", lambda folder: (folder / "stage_times.json").write_text('{"sch')),
    "linked": ("config.json", lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").symlink_to("/etc/passwd"))),
    "no summary": ("profiler_summary.json", lambda folder: (folder / "profiler_summary.json").unlink()),
    "count": ("stage_times.json", _edited("stage_times.json", lambda d: d["totals"][0].update(count=7))),
    "self time": ("profiler_context/stage_times.json", _edited("profiler_context/stage_times.json", lambda d: d["stages"]["forward"].update(self_seconds=9))),
    "step": ("stage_times.json", _edited("stage_times.json", lambda d: d["per_step"][2].update(seconds=9))),
    "steps out of order": ("stage_times.json", _edited("stage_times.json", lambda d: d["per_step"].reverse())),
    "missing step": ("stage_times.json", _edited("stage_times.json", lambda d: d.update(steps_on_file=4))),
    "other run": ("config.json", _edited("config.json", lambda d: d.update(run_id="other"))),
    "foreign schema": ("metrics.json", _edited("metrics.json", lambda d: d.update(schema="x"))),
    "wrong shape": ("stage_times.json", _edited("stage_times.json", lambda d: d.update(per_step=3))),
    "empty trace": ("trace.json", _edited("trace.json", lambda d: d.update(traceEvents=[]))),
    "operators": ("op_stats.csv", lambda folder: (folder / "op_stats.csv").write_text((folder / "op_stats.csv").read_text().replace("operator,", "operator,x,", 1))),
    "path": ("torch_profiler/../../../../etc/passwd", _path_among_captures),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERED)
def test_what_was_tampered_with_is_named_by_its_file(run: Path, case: str, cli: Cli) -> None:
    """Exit code 1 stops a pipeline; the file's name says where to look."""
    put_capture(run)
    folder = write(run, 0).folder
    assert cli("validate", folder).code == 0
    name, tamper = TAMPERED[case]
    tamper(folder)
    code, out, _ = cli("validate", folder, "--json")

    assert code == 1
    assert name in {fault["file"] for fault in json.loads(out)["faults"]}


def test_metrics_and_totals_of_a_run_that_ended_must_agree(run: Path) -> None:
    """Two exports of one run that differ: one of them lost something."""
    say_summary(run)
    point = {
        "attributes": [{"key": "train.phase", "value": {"stringValue": "train"}}],
        "count": "20", "sum": 0.04, "scale": 3, "timeUnixNano": "1000000000",
    }  # fmt: skip
    metric = {"name": "train.stage.duration", "exponentialHistogram": {"dataPoints": [point]}}
    line = {"resourceMetrics": [{"resource": {"attributes": []}, "scopeMetrics": [{"metrics": [metric]}]}]}
    path = run / "rank0" / "metrics.otlp.jsonl"
    path.write_text(json.dumps(line) + "\n")
    agreed = main(["validate", str(write(run, 0).folder)])
    point["count"] = "19"
    path.write_text(json.dumps(line) + "\n")

    assert agreed == 0
    assert main(["validate", str(write(run, 0).folder)]) == 1


def test_a_run_directory_is_checked_rank_by_rank(run: Path, cli: Cli) -> None:
    """Torn lines, lost records, sums that do not add up."""
    say_summary(run)
    sound = cli("validate", run).code
    telemetry = read(run / "rank0", "summary.json")["telemetry"]
    say_summary(run, telemetry={**telemetry, "records_lost": 3}, activities={"productive": 1.0})
    (run / "rank0" / "events.jsonl").write_text('{"a": 1}\nnot json\n{"torn')
    code, said, _ = cli("validate", run)

    assert (sound, code) == (0, 1)
    assert "rank0/events.jsonl: 1 line is not a JSON object" in said
    assert "3 records were lost" in said
    assert "activities add up to 1.0 s, wall_seconds is 0.05 s" in said


def test_ranks_of_a_large_run_are_checked_in_several_processes(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks took an hour of one processor, some of it for reading the folders of all ranks for each rank."""
    say_summary(run)
    for rank in range(1, 12):
        shutil.copytree(run / "rank0", run / f"rank{rank}")
        summary = run / f"rank{rank}" / "summary.json"
        summary.write_text(json.dumps({**read(summary.parent, summary.name), "rank": rank}))
    (run / "rank7" / "events.jsonl").write_text("not json\n")
    monkeypatch.setattr("otel_train.profiler.storage.rank_folders", pytest.fail)
    monkeypatch.setattr("otel_train.artifacts.validate.read_run", _read_elsewhere(os.getpid(), read_run))
    code, said, _ = cli("validate", run)

    assert (code, said.splitlines()) == (
        1,
        ["rank7/events.jsonl: 1 line is not a JSON object", f"{run}: 1 fault"],
    )


def test_a_check_of_a_run_accounts_no_events_of_its_flight_file(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks whether the file holds any. Of a full one that took seconds per rank, and nothing was made of the steps."""
    say_summary(run)
    monkeypatch.setattr("otel_train.rundata.run.FlightHistory", pytest.fail)

    assert "complete and consistent" in cli("validate", run).printed


def _read_elsewhere(parent: int, read: Callable[..., Any]) -> Callable[..., Any]:
    def read_run(run: Path, rank: int) -> Any:
        assert os.getpid() != parent
        return read(run, rank)

    return read_run


def _with_metadata(run: Path) -> Path:
    trace = put_capture(run)
    record = {
        "file": trace.name, "bytes": trace.stat().st_size, "trigger": "on_demand", "reason": "", "alert": "", "rank": 0,
        "epoch": 1, "steps": [2, 4], "steps_asked": 3, "steps_recorded": 3, "begun_unix_ns": 1, "ended_unix_ns": 2,
        "seconds": 1.0, "options": {}, "problem": "", "warnings": [],
    }  # fmt: skip
    replace_json(trace.with_name("epoch_1-step_2-rank0.record.json"), record)
    return trace


def _link_to_a_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("moved")


def _file_for_a_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


CAPTURES_SPOILED = {
    "vanished": ("captures/epoch_1-step_2-rank0.json.gz: No such file", lambda trace: trace.unlink()),
    "cut": ("captures/epoch_1-step_2-rank0.json.gz: has 40 bytes; epoch_1-step_2", lambda trace: os.truncate(trace, 40)),
    "a file": ("captures: cannot be read: no folder", lambda trace: _file_for_a_folder(trace.parent)),
    "a link": ("captures: cannot be read: a link", lambda trace: _link_to_a_folder(trace.parent)),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "spoil"), CAPTURES_SPOILED.values(), ids=CAPTURES_SPOILED)
def test_a_capture_that_is_damaged_or_gone_is_a_fault(
    fault: str, spoil: Callable[[Path], Any], run: Path, cli: Cli
) -> None:
    """Only the metadata was checked: the run was called complete without its traces."""
    say_summary(run)
    trace = _with_metadata(run)
    sound = cli("validate", run).code
    spoil(trace)
    code, said, _ = cli("validate", run)

    assert (sound, code) == (0, 1)
    assert fault in said


def test_an_analysis_names_the_capture_that_cannot_be_read(run: Path, cli: Cli) -> None:
    """It said "no readable capture", without name and reason."""
    say_summary(run)
    put_capture(run, torn=True)
    said = " ".join(cli("validate", run, "--analysis").out.split())

    assert (
        "No operations: no readable capture. The capture epoch_1-step_2-rank0.json.gz is passed over" in said
    )


def test_a_capture_that_could_not_be_written_is_no_fault(run: Path, cli: Cli) -> None:
    """Its metadata has no file, and the reason."""
    say_summary(run)
    trace = _with_metadata(run)
    trace.unlink()
    path = trace.with_name("epoch_1-step_2-rank0.record.json")
    replace_json(path, {**read(path.parent, path.name), "file": "", "bytes": 0, "problem": "not written"})

    assert cli("validate", run).code == 0


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"run_id": "r2"}, "rank0/summary.json: run_id is 'r2'; that of run.json is 'r1'"),
        ({"rank": 1}, "rank0/summary.json: rank is 1; that of the folder rank0 is 0"),
    ],
)
def test_files_of_another_run_or_rank_are_a_fault(
    values: dict[str, Any], fault: str, run: Path, cli: Cli
) -> None:
    """A folder that was copied from another run was called consistent."""
    say_summary(run, **values)
    code, said, _ = cli("validate", run)

    assert code == 1
    assert fault in said


def test_artifacts_whose_summary_is_gone_are_a_fault_of_the_run(run: Path, cli: Cli) -> None:
    """The mark of the writer is left: without the summary the folder passed as absent."""
    say_summary(run)
    write(run, 0)
    sound = cli("validate", run).code
    (run / "artifacts" / "profiler_summary.json").unlink()
    code, said, _ = cli("validate", run)

    assert (sound, code) == (0, 1)
    assert "artifacts/profiler_summary.json" in said


def test_what_this_user_may_not_read_is_a_fault_by_its_folder(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an unexpected error, or the run was called complete."""
    say_summary(run)
    write(run, 0)
    _with_metadata(run)
    cli("validate", run)  # imports everything
    monkeypatch.chdir(run.parent)  # pytest's folders above it are closed to other users
    locked = [run / name for name in ("artifacts", "captures")]
    user = os.geteuid()
    try:
        for folder in locked:
            folder.chmod(0)
        for path in (run.parent, *run.rglob("*"), run):
            if not user:
                os.chown(path, WITHOUT_RIGHTS, -1)
        os.seteuid(user or WITHOUT_RIGHTS)
        code, said, err = cli("validate", f"./{run.name}")
    finally:
        os.seteuid(user)
        for folder in locked:
            folder.chmod(0o700)

    assert (code, err) == (1, "")
    assert said.splitlines()[:-1] == [
        "captures: cannot be read: Permission denied",
        "artifacts: cannot be read: Permission denied",
    ]


def test_a_run_that_recorded_nothing_needs_no_events_in_its_flight_file(tmp_path: Path, cli: Cli) -> None:
    """A program that ends before its first step leaves a flight file without an event."""
    run = leave_run(tmp_path, ())
    say_summary(run)
    summary = read(run / "rank0", "summary.json")
    assert "rank0/flight.bin: is missing" in cli("validate", run).out
    replace_json(run / "rank0/summary.json", {**summary, "telemetry": {**summary["telemetry"], "records": 0}})
    assert cli("validate", run).code == 0


def test_a_run_whose_values_break_a_law_is_not_sound(run: Path, cli: Cli) -> None:
    """Seen: a stage was innermost for 1.11 s and open for 0.31 s, and the check passed it."""
    say_summary(run)
    summary = read(run / "rank0", "summary.json")
    summary["stages"][0] |= {"self_seconds": 1.11, "inclusive_seconds": 0.31}
    say_summary(run, stages=summary["stages"])
    code, said, _ = cli("validate", run)

    assert code == 1
    fault = "stages: self_seconds of train code data is 1.11 s, its inclusive_seconds 0.31 s"
    assert f"rank0/summary.json: {fault}" in said


@pytest.mark.parametrize(
    ("row", "said"), [({}, ""), ({"total_seconds": "x"}, "step_durations[0].total_seconds is")]
)
def test_durations_of_steps_that_are_not_known_or_wrong_are_no_crash(
    run: Path, row: dict[str, Any], said: str, cli: Cli
) -> None:
    """The schema did not describe them, and the command ended in an unexpected error."""
    unknown = {"phase": "train", "loader": "code", "count": 5, "total_seconds": None}
    say_summary(run, steps={"train": 700}, step_durations=[unknown])
    folder = write(run, 0).folder
    summary = read(folder, "profiler_summary.json")
    replace_json(folder / "profiler_summary.json", {**summary, "step_durations": [{**unknown, **row}]})

    code, out, _ = cli("validate", folder)

    assert code != 2
    assert said in out


def test_a_folder_that_is_neither_is_no_fault_but_an_error(tmp_path: Path) -> None:
    """A mistyped path must not read as a broken run."""
    assert main(["validate", str(tmp_path)]) == 2
    assert main(["validate", str(tmp_path / "none")]) == 2


def test_names_from_a_run_are_text_in_the_report(tmp_path: Path, cli: Cli) -> None:
    """A loader may be called anything, and the page opens in a browser; so may a terminal be written to."""
    evil = '<script>alert("x")</script>\x1b[2J'
    folder = write(leave_run(tmp_path, (3,), loader=evil), 0).folder

    assert "\x1b" not in cli("validate", folder, "--report", "--analysis").printed
    assert "<script>alert" not in (folder / "report.html").read_text(encoding="utf-8")


def test_artifacts_and_check_need_no_torch(run: Path) -> None:
    """They run where the results are looked at, which is seldom where there is a GPU."""
    put_capture(run)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from otel_train.cli.main import main\n"
        f"sys.exit(main(['artifacts', {str(run)!r}]) or main(['check', {str(run / 'artifacts')!r}, '--analysis']))"
    )

    printed_by("-c", program)


def test_a_rank_that_is_not_there_is_named_with_those_that_are(run: Path, cli: Cli) -> None:
    """The message saves listing the folder."""
    assert "no rank 3. Ranks: 0" in cli("export", run, "--rank", "3").refused


def test_a_program_behind_two_dashes_keeps_its_own_options(tmp_path: Path, cli: Cli) -> None:
    """--help of the program is not ours, and a RUN beside a program is a mistake."""
    both = cli("profile", "r1", "--steps", "2", "--", "train.py", "--help")
    assert "either a live RUN, or a program" in both.refused
    assert "no such file" in cli("profile", "--output-dir", tmp_path, "--", tmp_path / "no.py").refused
