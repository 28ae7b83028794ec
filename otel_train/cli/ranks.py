"""Which folders of a run directory belong to which rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.errors import RunDirectoryError
from otel_train.exporters.run_directory import earlier_trainings, find_run, rank_directories
from otel_train.files import mark_of
from otel_train.sources import settle
from otel_train.text import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_MOST_NAMED = 4
"""Earlier trainings that are named, the latest of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that reads a run."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="a run directory, one of its rank folders, or a run id (default: newest)",
    )
    parser.add_argument("--rank", type=int, metavar="N", help="this rank alone")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per rank, a line each, for scripts"
    )
    add_run_dir(parser)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Where a command that is given the name of a run looks for it."""
    parser.add_argument(
        "--run-dir",
        default=default_run_dir(),
        metavar="D",
        help="folder that holds the run directories (default: the setting run_dir, else runs)",
    )


def default_run_dir() -> str:
    """Where a program that is started here leaves its runs, unless it says so itself."""
    return settle().config.run_dir  # what is wrong in other settings, otel-train doctor says


def chosen_ranks(args: argparse.Namespace, file_name: str) -> Mapping[int, Path]:
    """The folder of each rank asked for that has ``file_name``, by rank.

    Raises:
        RunDirectoryError: there is no such run, or no rank of it left such a file.
    """
    run = find_run(args.run, Path(args.run_dir))
    found = {
        _rank(folder): folder for folder in rank_directories(run) if mark_of(folder / file_name) is not None
    }
    if not found:
        raise RunDirectoryError(f"{run}: no rank has a {file_name} yet. Has training begun?")
    asked = asked_rank(args)
    if asked is None:
        return found
    if asked not in found:
        ranks = ", ".join(map(str, found))
        raise RunDirectoryError(f"{run}: rank {asked} has no {file_name}. Ranks that have one: {ranks}")
    return {asked: found[asked]}


def tell_earlier(run: Path) -> None:
    """Say on standard error that a run has had trainings before the one that is shown, and how to see them."""
    earlier = earlier_trainings(run)
    if earlier:
        others = "the one before" if len(earlier) == 1 else f"the {len(earlier)} before"
        said = f"{run} shows training {len(earlier) + 1} of its run. To see {others}, give as RUN: "
        named = ", ".join(str(path) for path in earlier[-_MOST_NAMED:])
        print(printable(f"otel-train: {said}{named}"), file=sys.stderr)


def asked_rank(args: argparse.Namespace) -> int | None:
    """The rank named by ``--rank``, or by the folder of a rank given as RUN."""
    folder = Path(args.run or "").resolve()
    of_folder = (
        _rank(folder) if args.run and folder.name[:4] == "rank" and folder.name[4:].isdigit() else None
    )
    rank: int | None = args.rank if args.rank is not None else of_folder
    return rank


def _rank(folder: Path) -> int:
    return int(folder.name.removeprefix("rank"))
