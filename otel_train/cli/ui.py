"""``otel-train ui``: the runs of a folder as a page in the browser, live."""

from __future__ import annotations

import argparse
from pathlib import Path

from otel_train.cli.arguments import complain, default_run_dir
from otel_train.config.validation import MOST_PORT
from otel_train.errors import ConfigError, RunDirectoryError, require
from otel_train.rundata.files import is_run
from otel_train.safety import printable

HOST, PORT = "127.0.0.1", 8420
DESCRIPTION = """\
A page in the browser that follows runs while they train: Overview, Timing, Memory and Artifacts of each rank, with alerts
and findings. It is a process of its own that reads run directories and flight files: the training does not notice.
"""
EPILOG = """\
RUNS is a folder of run directories, or one run directory. What is not there yet appears when it comes. Nothing is changed,
nothing is fetched from a network, and only this machine can ask, unless --host says otherwise. Ctrl-C ends it.

examples:
  otel-train ui                                the runs below runs/, or where run_dir says
  otel-train ui /scratch/me/runs --port 9000
  otel-train ui runs/20260131-x7 --no-open     one run; prints the address
  ssh -L 8420:127.0.0.1:8420 trainer           then here: http://127.0.0.1:8420/, while it runs there
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add = parser.add_argument
    runs = "folder of run directories, or one (default: the setting run_dir, else runs)"
    add("runs", nargs="?", metavar="RUNS", help=runs)
    port = f"port, or the next that is free (default: {PORT})"
    add("--port", type=int, default=PORT, metavar="P", help=port)
    host = f"address to listen on (default: {HOST}: this machine alone can ask)"
    add("--host", default=HOST, metavar="H", help=host)
    browser = "open the browser (default: where there is a screen)"
    add("--open", action=argparse.BooleanOptionalAction, help=browser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if not 0 <= args.port <= MOST_PORT:
        rule = f"expected a number from 0 to {MOST_PORT}; 0 takes any that is free"
        raise ConfigError(f"--port {args.port}: {rule}")
    for module in ("starlette", "uvicorn"):
        require(module, extra="web")
    from otel_train.ui import server

    root, only = _chosen(args.runs)
    sock = server.listen(args.host, args.port)
    address = server.address_of(sock)
    print(printable(f"{only or root} at {address}"), flush=True)
    if args.port and sock.getsockname()[1] != args.port:
        complain(f"port {args.port} is taken")
    if args.host not in (HOST, "localhost", "::1"):
        complain("whoever can reach this address can read these runs")
    if not root.exists():
        complain(f"{root} is not there yet; the page shows its runs when they come")
    if server.has_screen() if args.open is None else args.open:
        server.show(address)
    server.serve(root, sock, only=only, hosts=(args.host,))
    return 0


def _chosen(runs: str | None) -> tuple[Path, str | None]:
    """The folder of runs, and the one run to show if a run was given."""
    root = Path(runs or default_run_dir()).resolve()
    if is_run(root):
        return root.parent, root.name
    if root.exists() and not root.is_dir():
        remedy = "Give one that holds run directories, or a run directory"
        raise RunDirectoryError(f"{runs}: is no folder. {remedy}")
    return root, None
