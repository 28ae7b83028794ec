"""Command-line arguments that several commands share: the runs, ranks and traces that they name."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

from otel_train.cli import complain
from otel_train.config.sources import resolve
from otel_train.datamodel import FLIGHT_FILE, RUN_FILE
from otel_train.errors import RunDirectoryError, TraceError, shown
from otel_train.exporters.run_directory import earlier_trainings, find_run
from otel_train.files import folder_problem, mark_of, problem_of, rank_folders, rank_problems, read_json
from otel_train.profiler.storage import captures_of, taken_together
from otel_train.safety import printable
from otel_train.trace_analysis.events import Trace, read

Document = TypeVar("Document")
Item = TypeVar("Item")

LARGE_BYTES = 100 << 20
"""Least size of a trace file for which a progress line is shown: smaller ones are read quickly."""

_REDRAW_INTERVAL_S = 0.2


def kind_of(target: str | Path) -> str:
    """Returns "file", "folder" or "other"; "" if there is no such path, also if it is too long, as the id of a run may be.

    Raises:
        RunDirectoryError: this user may not read it.
    """
    try:
        mode = Path(target).stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return ""
        raise RunDirectoryError(f"{target}: cannot be read: {error.strerror or error}") from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def names_a_file(target: str) -> bool:
    """Returns whether the argument is the path of a file rather than a run; raises RunDirectoryError for a pipe or a device."""
    kind = kind_of(target)
    if not kind and Path(target).suffix in (".json", ".gz"):
        raise RunDirectoryError(f"{target}: there is no such file")
    if kind == "other":
        raise RunDirectoryError(
            f"{target}: is a pipe, a socket or a device. Write its content to a file first"
        )
    return kind == "file"


def chosen_traces(targets: Sequence[str], run_dir: str) -> list[Path]:
    """Returns the given trace files, or of a run (default: the newest) its newest capture, from all ranks that took part."""
    files = [Path(target) for target in targets]
    if files and all(map(names_a_file, targets)):
        return files
    if len(targets) > 1:
        missing = next(file for file in files if kind_of(file) != "file")
        raise RunDirectoryError(f"{missing}: is not a file. Give trace files, or one run")
    run = chosen_run(targets[0] if targets else None, run_dir)
    if captures := captures_of(run):
        return taken_together(captures, captures[-1])
    raise RunDirectoryError(
        f"{run}: has no captures. Take one with 'otel-train profile', or give the path of a trace"
    )


def read_trace(path: Path) -> Trace:
    """Reads a trace, with a progress line on a terminal."""
    return read(path, progress=progress(path, sys.stderr))


def progress(path: Path, stream: TextIO) -> Callable[[int, int], None] | None:
    """Returns a callback that draws the progress of reading a large file on a terminal; None for a small file or no terminal."""
    try:
        large = path.stat().st_size >= LARGE_BYTES
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not large or not stream.isatty():
        return None
    begun, write = time.monotonic(), _line_writer(stream)

    def show(done: int, size: int) -> None:
        rate = done / 1e6 / max(time.monotonic() - begun, 1e-9)
        text = f"reading {printable(path.name)}  {done / size:4.0%}  {rate:,.0f} MB/s"
        write(text if done < size else "")

    return show


def _line_writer(stream: TextIO) -> Callable[[str], None]:
    """Returns a function that rewrites the last line of a terminal, at most five times a second; "" clears the line."""
    last = [0.0]

    def write(text: str) -> None:
        now = time.monotonic()
        if not text or now - last[0] >= _REDRAW_INTERVAL_S:
            last[0] = now
            print(f"\r\x1b[K{text}", end="", file=stream, flush=True)

    return write


_MANY_RANKS = 8
"""Least number of ranks for which slow work is divided among several processes."""

_MOST_PROCESSES = 32

_MOST_NAMED = 4
"""Most entries of a list in a message: the latest earlier trainings, the first groups of ranks."""


def add_run_arguments(
    parser: argparse.ArgumentParser,
    *,
    rank: str = "only this rank (default: all)",
    documents: str = "print JSON: one object per rank and line",
) -> None:
    """Adds the arguments of a command that reads a run; ``rank`` and ``documents`` are the help of --rank and --json."""
    run = "a run directory, one of its rank folders, or a run id (default: the newest run)"
    parser.add_argument("run", nargs="?", metavar="RUN", help=run)
    parser.add_argument("--rank", type=at_least(0), metavar="N", help=rank)
    parser.add_argument("--json", action="store_true", help=documents)
    add_run_dir(parser)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--run-dir``."""
    folder = "folder of the run directories (default: the setting run_dir, else runs)"
    parser.add_argument("--run-dir", default=default_run_dir(), metavar="D", help=folder)


MOST_INT: Final = 2**63 - 1


def at_least(least: int, most: int = MOST_INT, *, zero: str = "") -> Callable[[str], int]:
    """Returns a parser of whole numbers from ``least`` to ``most``; ``zero``: the meaning of 0, for the error message."""
    rule = f"from {least} to {most}" if most < MOST_INT else f"from {least} on"

    def parse(given: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,19}", given) and least <= int(given) <= most:
            return int(given)
        raise argparse.ArgumentTypeError(f"{shown(given)}: expected a whole number {rule}{zero}")

    return parse


def amount(unit: str, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Returns a parser of numbers of ``unit`` from 0 to ``most``; ``above``: 0 itself is refused."""

    def parse(given: str) -> float:
        with suppress(ValueError):
            value = float(given)
            if 0 <= value <= most and not (above and value == 0):
                return value
        least = "above 0, up to" if above else "from 0 to"
        raise argparse.ArgumentTypeError(f"{shown(given)}: expected {unit} {least} {most:g}")

    return parse


class FormerOption(argparse.Action):
    """An option under its former name; prints the new name to standard error."""

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Sets the option of the new name."""
        renamed = f"--{self.dest.replace('_', '-')}"
        complain(f"{option} is now {renamed}; version 0.2 refuses the former name")
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def default_run_dir() -> str:
    """Returns the setting ``run_dir``, as environment and settings file give it in the working directory."""
    return resolve().config.run_dir  # otel-train doctor reports what is wrong in other settings


def ignored_settings(run_dir: str) -> str:
    """Returns the problems of ignored settings if ``run_dir`` is the default, which one of them may have been meant to change."""
    settings = resolve()
    if run_dir != settings.config.run_dir or "run_dir" in settings.origins:
        return ""
    return " ".join(map(str, settings.origins.ignored))


def chosen_run(run: str | None, run_dir: str) -> Path:
    """Returns the run directory of the argument RUN; None: the newest. See ``find_run``."""
    try:
        return find_run(run, Path(run_dir))
    except RunDirectoryError as error:
        if ignored := ignored_settings(run_dir):
            raise RunDirectoryError(f"{error} {ignored}") from error
        raise


def ranks_with(run: Path, file_name: str) -> Mapping[int, Path]:
    """Returns the folder of each rank that has ``file_name``, by rank; raises RunDirectoryError if no rank has it."""
    folders = rank_folders(run).items()
    if found := {rank: folder for rank, folder in folders if mark_of(folder / file_name) is not None}:
        return found
    for problem in _rank_errors(run):
        raise problem
    for path in (folder / file_name for _, folder in folders):
        if os.path.lexists(path):
            raise RunDirectoryError(f"{path}: cannot be read: {problem_of(path)}")
    switched_off = " Or is it switched off (flight_recorder=False)?" if file_name == FLIGHT_FILE else ""
    raise RunDirectoryError(f"{run}: no rank has a {file_name} yet. Has training begun?{switched_off}")


def _rank_errors(run: Path) -> list[RunDirectoryError]:
    found = rank_problems(run).items()
    return [RunDirectoryError(f"{run / f'rank{rank}'}: cannot be read: {problem}") for rank, problem in found]


def chosen_ranks(args: argparse.Namespace, file_name: str) -> Mapping[int, Path]:
    """Returns the folder of each selected rank that has ``file_name``, by rank."""
    run = chosen_run(args.run, args.run_dir)
    found = ranks_with(run, file_name)
    selected = _named_rank(args.run, args.rank)
    if selected is None:
        return found
    if selected not in found:
        if problem := folder_problem(run / f"rank{selected}"):
            raise RunDirectoryError(f"{run / f'rank{selected}'}: cannot be read: {problem}")
        problem = f"{run}: rank {selected} has no {file_name}. Ranks that have one: {listed(list(found))}"
        raise RunDirectoryError(problem)
    return {selected: found[selected]}


def read_ranks(
    args: argparse.Namespace, file_name: str, read: Callable[[Path], Document], *, is_slow: bool = False
) -> tuple[dict[Path, Document], int]:
    """Reads a document of each selected rank, and reports on standard error the ranks for which that fails.

    Args:
        args: arguments of the command, which select the run and its ranks.
        file_name: ranks without this file are skipped.
        read: reads the document from the folder of a rank.
        is_slow: ``read`` takes about a second: many ranks are read in several processes, so it must be picklable.

    Returns:
        The documents by folder, and the exit code.

    Raises:
        RunDirectoryError: no rank can be read.
    """
    folders, problems, found = chosen_ranks(args, file_name), [], {}
    work = partial(read_or_problem, read)
    apply = in_processes if is_slow else map
    for folder, document in zip(folders.values(), apply(work, folders.values()), strict=True):
        if isinstance(document, RunDirectoryError):
            problems.append(document)
        else:
            found[folder] = document
    if not found:
        raise problems[0]
    run = next(iter(found)).parent
    if _named_rank(args.run, args.rank) is None:
        unreadable = rank_problems(run)
        problems += _rank_errors(run)
        without = [rank for rank in rank_folders(run) if rank not in folders and rank not in unreadable]
        if without:
            complain(f"{run}: {named_ranks(without)} left no {file_name}")
    for problem in problems:
        complain(str(problem))
    return found, 1 if problems else 0


def read_or_problem(read: Callable[[Path], Document], folder: Path) -> Document | RunDirectoryError:
    """Returns the document of a rank, or the error that says why it cannot be read."""
    try:
        return read(folder)
    except RunDirectoryError as error:
        return error


def in_processes(work: Callable[[Item], Document], ranks: Collection[Item]) -> list[Document]:
    """Applies ``work`` to ranks, to many of them in forked processes; in this process if one cannot be started, or is killed."""
    if len(ranks) < _MANY_RANKS:
        return list(map(work, ranks))
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from otel_train.autoinstrument.runner import end_with_parent

    end_too = end_with_parent()

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker ends at Ctrl-C without a traceback
        end_too()

    try:
        number = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        with ProcessPoolExecutor(number, get_context("fork"), begin) as pool:
            return list(_counted(pool.map(work, ranks), len(ranks)))
    except (OSError, RuntimeError):
        return list(_counted(map(work, ranks), len(ranks)))


def _counted(results: Iterable[Document], number: int) -> Iterator[Document]:
    """Yields the results for ranks, and shows on a terminal how many are done."""
    write = _line_writer(sys.stderr) if sys.stderr.isatty() else None
    for done, result in enumerate(results, 1):
        if write is not None:
            write(f"read {done:,} of {number:,} ranks" if done < number else "")
        yield result


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text, such as ``ranks 0-7, 12``; of many groups the first ones and the number of the rest."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """Returns the text of ``named_ranks`` without the word ``ranks``."""
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    shown, rest = groups[:_MOST_NAMED], sum(map(len, groups[_MOST_NAMED:]))
    words = ", ".join(f"{each[0]}-{each[-1]}" if each[1:-1] else ", ".join(map(str, each)) for each in shown)
    return f"{words}{f' and {rest} more' if rest else ''}"


def ranks_present(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns ``N ranks``, or ``N of M ranks`` if some of the M have no files here: each host may have its own run directory."""
    world_size = max((each.get("world_size") or 0 for each in documents), default=0)
    return f"{len(documents)}{f' of {world_size}' if world_size > len(documents) else ''} ranks"


def one_rank(target: str | None, args: argparse.Namespace) -> tuple[int, Path]:
    """Returns the selected rank of a run, else its lowest, with its folder."""
    run = chosen_run(target, args.run_dir)
    ranks, selected = rank_folders(run), _named_rank(target, args.rank)
    rank = min(ranks, default=0) if selected is None else selected
    if rank not in ranks:
        raise RunDirectoryError(f"{run}: has no rank {rank}. Ranks: {listed(list(ranks)) or 'none'}")
    return rank, ranks[rank]


def _named_rank(target: str | None, rank: int | None) -> int | None:
    """Returns the rank of the option --rank, or of a rank folder that was given as RUN; None if neither selects one."""
    if rank is None and target:
        found = re.fullmatch(r"rank(\d+)", Path(target).resolve().name)
        return int(found[1]) if found else None
    return rank


def print_earlier_trainings(run: Path) -> None:
    """Prints to standard error that the run has earlier trainings, and how to show them."""
    earlier = earlier_trainings(run)
    if earlier:
        others = "the one before" if len(earlier) == 1 else f"the {len(earlier)} before"
        message = f"{run} shows {_training_of(run)} of its run. To see {others}, give as RUN: "
        complain(message + ", ".join(map(str, earlier[-_MOST_NAMED:])))


def _training_of(run: Path) -> str:
    """Returns which training is in a run directory: its number, where ``run.json`` has one."""
    with suppress(RunDirectoryError):
        number = read_json(run / RUN_FILE).get("training")
        if isinstance(number, int):
            return f"training {number}"
    return "the newest training"
