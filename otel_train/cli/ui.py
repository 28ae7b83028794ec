"""``otel-train ui``: serves the pages of runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from otel_train.cli import complain
from otel_train.cli.arguments import at_least, default_run_dir, ignored_settings, kind_of
from otel_train.config.validation import MOST_PORT
from otel_train.errors import RunDirectoryError, require
from otel_train.exporters.run_directory import folder_name
from otel_train.rundata.files import is_run
from otel_train.safety import printable

HOST, PORT = "127.0.0.1", 8420
DESCRIPTION = """\
Serve pages of runs to the browser: Overview, Timing, Memory and Artifacts of each rank, with alerts and findings,
updated while the run trains.
"""
EPILOG = """\
RUNS is a folder of run directories, one run directory, or a run id. New runs appear by themselves. Pages are made from the
files of the run directories, in this process; the training process is not involved. Nothing is written, nothing is
loaded from a network. Ctrl-C ends it.

examples:
  otel-train ui                                the runs below runs/ (setting: run_dir)
  otel-train ui /scratch/me/runs --port 9000
  otel-train ui 20260131-x7 --no-open          one run; only print the address
  ssh -L 8420:127.0.0.1:8420 trainer           from another machine, then open http://127.0.0.1:8420/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    runs = (
        "folder of run directories, one run directory, or a run id (default: the setting run_dir, else runs)"
    )
    add("runs", nargs="?", metavar="RUNS", help=runs)
    port = f"port, or the next free one (default: {PORT}); 0: any"
    add(
        "--port",
        type=at_least(0, MOST_PORT, zero="; 0 takes any that is free"),
        default=PORT,
        metavar="P",
        help=port,
    )
    host = f"address to listen on (default: {HOST}, reachable from this machine only)"
    add("--host", default=HOST, metavar="H", help=host)
    browser = "open the browser (default: if there is a display, and not over SSH)"
    add("--open", action=argparse.BooleanOptionalAction, help=browser)


def run(args: argparse.Namespace) -> int:
    """Serves the pages until Ctrl-C."""
    for module in ("starlette", "uvicorn"):
        require(module, extra="web")
    from otel_train.ui import server

    root, only = _chosen(args.runs)
    sock = server.listen(args.host, args.port)
    address = server.browser_url(sock)
    print(printable(f"{only or root} at {address}"), flush=True)
    if args.port and sock.getsockname()[1] != args.port:
        complain(f"port {args.port} is taken")
    if args.host not in (HOST, "localhost", "::1"):
        complain("everyone who can reach this address can read these runs")
    if args.runs is None and (ignored := ignored_settings(default_run_dir())):
        complain(ignored)
    if not kind_of(root):
        complain(f"{root} does not exist yet; the page shows runs once there are any")
    if server.has_screen(os.environ) if args.open is None else args.open:
        server.show(address)
    server.PageServer(root, only=only, hosts=(args.host,)).run(sockets=[sock])
    return 0


def _chosen(runs: str | None) -> tuple[Path, str | None]:
    """Returns the folder of runs, and the one run to show if a run was given."""
    below = default_run_dir()
    root = Path(runs or below).resolve()
    if runs and not kind_of(root):  # then it is the id of a run, as in other commands
        root = Path(below, folder_name(runs)).resolve()
    if is_run(root):
        return root.parent, root.name
    if runs and kind_of(root) != "folder":
        rule = f"expected a folder of run directories, a run directory, or the id of a run below {below}"
        problem = "is not a folder" if kind_of(runs) else "there is no such folder"
        raise RunDirectoryError(f"{runs}: {problem}; {rule}. Without RUNS all runs below {below} are shown")
    return root, None
