"""``otel-train profile``: requests a profiler capture of a live run, or runs a program with one."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from otel_train.artifacts.writer import OPS, write
from otel_train.cli import arguments, complain, print_json
from otel_train.cli.arguments import amount, at_least
from otel_train.cli.export import say
from otel_train.cli.run import launched
from otel_train.config.sources import resolve
from otel_train.config.validation import variable_of
from otel_train.datamodel import CAPTURES_FOLDER, FLIGHT_FILE, RUN_FILE
from otel_train.errors import ConfigError, RunDirectoryError
from otel_train.exporters.run_directory import folder_name
from otel_train.files import JsonFileCache, absolute, mark_of, names_in, read_json
from otel_train.profiler.requests import MOST_STEPS, REQUEST_FILE, activities, leave_request, take_back
from otel_train.profiler.storage import METADATA_SUFFIX
from otel_train.resource import detect
from otel_train.rundata.files import current_document, has_postmortem, summary_of
from otel_train.rundata.live_view import state_of
from otel_train.safety import printable, signal_name

DESCRIPTION = "Capture some steps of a live run with torch.profiler, or run a program with one capture."
EPILOG = """\
The run continues. The profiler starts and stops at step boundaries; several ranks capture the same steps. Traces are
written to captures/ of the run directory, each with a JSON file of metadata and findings.

examples:
  otel-train profile                              the newest run, lowest rank, 5 steps
  otel-train profile 20260131-x7 --ranks 0,3      the same steps on two ranks
  otel-train profile --stacks --steps 2           with source lines of your program; slower
  otel-train analyze runs/20260131-x7/captures/epoch_1-step_200-rank0.json.gz

A program after -- is started as by 'otel-train run', captured once after some warm-up steps, and its artifacts are
written to --output-dir. With --output-dir, but without program and RUN, the demo is profiled.

  otel-train profile --steps 50 --output-dir /tmp/profile -- train.py --epochs 3
  otel-train profile --steps 50 --output-dir /tmp/profile

Exit codes for a live run: 0 captured, 1 partly captured, 2 not captured. With a program: its own; 1 if it ended
well but nothing was captured.
"""
LONGEST_TIMEOUT_S = 86_400.0

FINDING_S = 30.0
"""Longest wait for the finding of a trace that has been written: it comes from an analysis that takes a while."""

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.usage = "otel-train profile [RUN] [options] | otel-train profile [options] -- PROGRAM [arguments]"
    arguments.add_run_arguments(parser, rank="the same as --ranks N")
    add = parser.add_argument
    ranks = "ranks to capture, such as 0,3, or 'all' (default: the lowest)"
    add("--ranks", default="", metavar="RANKS", help=ranks)
    steps, warmup = at_least(1, MOST_STEPS), at_least(0, MOST_STEPS)
    add("--steps", type=steps, default=5, metavar="N", help="steps to record (default: 5)")
    add(
        "--warmup",
        type=warmup,
        default=1,
        metavar="N",
        help="profiler warm-up steps before them (default: 1)",
    )
    kinds = "activities to record, of cpu, cuda, xpu, mtia (default: %(default)s)"
    add("--activities", default="cpu,cuda", metavar="A,A", help=kinds)
    add("--shapes", action="store_true", help="record shapes of inputs")
    add("--stacks", action="store_true", help="record call stacks")
    add("--memory", action="store_true", help="record memory allocations")
    add("--flops", action="store_true", help="record floating-point operations")
    add("--pin", action="store_true", help="keep this capture: the limits on captures do not remove it")
    reason = "reason, stored in the metadata of the capture"
    add("--reason", default="otel-train profile", metavar="TEXT", help=reason)
    add("--output-dir", metavar="DIR", help="also write the artifacts of the run to this folder")
    timeout = "seconds to wait for the capture (default: 300)"
    seconds = amount("seconds", LONGEST_TIMEOUT_S, above=True)
    add("--timeout", type=seconds, default=300.0, metavar="S", help=timeout)


def starts_program(args: argparse.Namespace) -> bool:
    """Returns whether the arguments name a program, or the demo, rather than a live run."""
    return bool(args.program or (args.output_dir and not args.run))


def run(args: argparse.Namespace) -> int:
    """Requests a capture of a live run, waits for it and prints the result; or runs a program."""
    if starts_program(args):
        return run_program(args)
    folders, documents = _chosen(args), JsonFileCache()
    first = next(iter(folders.values()))
    _refuse_ended(folders, documents)
    request = {
        "steps": args.steps, "warmup": args.warmup, "activities": list(activities(args.activities)),
        **_options(args), "pinned": args.pin, "reason": args.reason, "request_id": uuid4().hex,
    }  # fmt: skip
    if len(folders) > 1:
        request["ranks"] = list(folders)
    captures = first.parent / CAPTURES_FOLDER
    before = {rank: _records(captures, rank) for rank in folders}
    deadline = time.monotonic() + args.timeout
    _leave(first, request, deadline, documents)
    if not args.json:
        same = ", the same ones on each" if len(folders) > 1 else ""
        message = f"requested {args.steps} steps of rank {', '.join(map(str, folders))}{same}; waiting"
        complain(message)
    try:
        found = _wait(
            captures,
            before,
            deadline,
            request_id=request["request_id"],
            has_ended=lambda rank: bool(_ended(folders[rank], documents)),
        )
    finally:
        take_back(first, request)
    for rank, folder in folders.items():
        ended = _ended(folder, documents)
        nothing = f"no capture: it {ended}" if ended else f"no capture after {args.timeout:g} s"
        _say(args, rank, found.get(rank), captures, nothing=nothing)
    if args.output_dir:
        say(write(first.parent, next(iter(folders)), Path(args.output_dir)), as_json=args.json)
    good = sum(1 for record in found.values() if record["file"] and not record["problem"])
    return 0 if good == len(folders) else 1 if any(record["file"] for record in found.values()) else 2


def _options(args: argparse.Namespace) -> dict[str, bool]:
    return {
        "record_shapes": args.shapes, "with_stack": args.stacks, "profile_memory": args.memory,
        "with_flops": args.flops,
    }  # fmt: skip


def _chosen(args: argparse.Namespace) -> dict[int, Path]:
    if args.ranks and args.rank is not None:
        raise ConfigError(f"--rank {args.rank} --ranks {args.ranks}: expected one of them. Leave one out")
    if not args.ranks:
        chosen = arguments.chosen_ranks(args, FLIGHT_FILE)
        return {min(chosen): chosen[min(chosen)]}
    live = arguments.ranks_with(arguments.chosen_run(args.run, args.run_dir), FLIGHT_FILE)
    if args.ranks == "all":
        return dict(live)
    try:
        wanted = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {args.ranks!r}: expected numbers, such as 0,3, or all") from None
    for rank in wanted:
        if rank not in live:
            raise RunDirectoryError(f"no rank {rank}. Ranks: {arguments.listed(list(live))}")
    return {rank: live[rank] for rank in wanted}


def _refuse_ended(folders: Mapping[int, Path], documents: JsonFileCache) -> None:
    for rank, folder in folders.items():
        if ended := _ended(folder, documents):
            raise RunDirectoryError(f"{folder.parent}: rank {rank} {ended}. Give a run that is training")


def _ended(folder: Path, documents: JsonFileCache) -> str:
    """Returns how a rank has ended, as the predicate of a sentence; "" if it may still train."""
    about = documents.get_or_empty(folder.parent / RUN_FILE, [])
    state, _ = state_of(folder, summary_of(documents, folder, []), about, time.time())
    if state.live:
        return ""
    return "is gone; its end was not recorded" if state.word == "gone" else f"has ended ({state.word})"


def _leave(folder: Path, request: dict[str, Any], deadline: float, documents: JsonFileCache) -> None:
    """Writes the request once the rank has read an earlier one, which would be replaced."""
    while mark_of(folder / REQUEST_FILE) is not None:
        if time.monotonic() > deadline or _ended(folder, documents):
            return
        time.sleep(_POLL_S)
    try:
        leave_request(folder, request)
    except OSError as error:
        raise RunDirectoryError(f"{folder}: the request cannot be written: {error}") from error


def _records(captures: Path, rank: int) -> set[Path]:
    return {captures / name for name in names_in(captures) if name.endswith(f"-rank{rank}{METADATA_SUFFIX}")}


def _wait(
    captures: Path,
    before: Mapping[int, set[Path]],
    deadline: float,
    *,
    request_id: str,
    has_ended: Callable[[int], bool],
) -> dict[int, dict[str, Any]]:
    """Returns the metadata of each rank's requested capture, with its finding if the analysis ends within ``FINDING_S``.

    Once all ranks without a capture have ended, the wait is as long: a capture that was under way is written by then.
    """
    found: dict[int, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        for rank in before:
            for path in _records(captures, rank) - before[rank]:
                with suppress(RunDirectoryError):
                    record = current_document(read_json(path))
                    if record.get("request_id") == request_id:  # others may be requested meanwhile
                        found[rank] = record
        if len(found) == len(before):
            if all(record["finding"] or not record["file"] for record in found.values()):
                break
            deadline = min(deadline, time.monotonic() + FINDING_S)
        elif all(has_ended(rank) for rank in before if rank not in found):
            deadline = min(deadline, time.monotonic() + FINDING_S)
        time.sleep(_POLL_S)
    return found


def _say(
    args: argparse.Namespace, rank: int, record: Mapping[str, Any] | None, captures: Path, *, nothing: str
) -> None:
    if args.json:
        print_json({"rank": rank, **(record or {"problem": nothing})})
    elif record is None:
        more = ". 'otel-train postmortem' shows whether it hangs" if has_postmortem(captures.parent) else ""
        print(f"rank {rank}: {nothing}{more}")
    else:
        lines = [record["problem"], *record["warnings"], record["finding"].get("summary", "")]
        if record["file"]:
            steps, where = "-".join(map(str, record["steps"])), captures / record["file"]
            lines.insert(0, f"steps {steps}: {where} ({record['bytes']:,} bytes)")
            lines.append(
                "" if record["finding"] else f"analyze it with: otel-train analyze {shlex.quote(str(where))}"
            )
        for line in filter(None, lines):
            print(printable(f"rank {rank}: {line}"))


SKIPPED_STEPS = 5
"""Steps before the capture: in the first ones, compilers, allocators and caches are still warming up."""

TURN_S = 0.1
"""Poll interval of the agent of a program, shorter than the default: a short program is captured before it ends."""

DEMO_STEPS_BESIDE = 60
"""Steps that the demo trains in addition to the captured ones."""


def run_program(args: argparse.Namespace) -> int:
    """Runs the program, or the demo if none is given; returns its exit code, or 1 if nothing was captured."""
    if args.run:
        raise ConfigError(f"{args.run}: give either a live RUN, or a program behind --")
    if args.ranks or args.rank is not None:
        given = f"--ranks {args.ranks}" if args.ranks else f"--rank {args.rank}"
        raise ConfigError(f"{given}: names ranks of a live run. Give the RUN as well, or leave it out")
    settings = _settings(args)
    config = resolve(environ={**os.environ, **settings}).config
    if config.disabled:
        raise ConfigError("OTEL_TRAIN_DISABLED=true: nothing can be profiled. Unset it")
    run_id = settings[variable_of("run_id")] = detect(config, os.environ).run_id
    demo = ["demo", "--epochs", "1", "--steps-per-epoch", str(args.steps + DEMO_STEPS_BESIDE)]
    program = args.program or ["-m", "otel_train", *demo]
    if program[0] == "-m":
        code = launched(program[2:], settings, module="".join(program[1:2]))
    else:
        code = launched(program, settings)
    home = Path(config.run_dir) / folder_name(run_id)
    if not home.is_dir():
        why = "It did not train, or it sets run_id or run_dir itself"
        raise RunDirectoryError(f"{home}: the program made no run directory there. {why}")
    written = write(home, 0, Path(args.output_dir) if args.output_dir else None)
    say(written, as_json=args.json)
    if code:
        complain(f"the program ended with {code if code > 0 else signal_name(-code)}")
        return code if code > 0 else 128 - code
    if "absent" not in written.files[OPS]:
        return 0
    complain(
        f"Nothing was captured: the program ended too early. Before a capture of {args.steps} steps it has to train "
        f"{SKIPPED_STEPS + args.warmup} steps, and on while the profiler is loaded, about a second. Let it train longer"
    )
    return 1


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Returns the settings, as environment variables, for one capture after the first ``SKIPPED_STEPS`` steps."""
    given = {
        "profiler": "on_demand",
        "profiler_schedule": f"active={args.steps},warmup={args.warmup},skip_first={SKIPPED_STEPS},repeat=1",
        "profiler_every": "epochs=1",
        "profiler_options": ",".join(name for name, given in _options(args).items() if given),
        "tuning": f"poll_interval_s={TURN_S},profiler_max_s={args.timeout}",
        "profiler_activities": ",".join(activities(args.activities)),
        "run_dir": str(absolute(Path(args.run_dir))),
    }
    return {variable_of(name): value for name, value in given.items() if value}
