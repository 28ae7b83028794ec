"""The ``otel-train`` command."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from otel_train.cli import complain
from otel_train.config.validation import DEBUG_VARIABLE
from otel_train.errors import OtelTrainError, near, shown
from otel_train.safety import daemon_thread, printable

COMMANDS = {
    "run": "run a training script with instrumentation, without a change to its code",
    "demo": "train a small model with instrumentation, for about a minute",
    "summary": "print the run summary: time per stage, bottleneck, remedy",
    "postmortem": "show the last steps and the open stage of a run that was killed or hangs",
    "compare": "compare two runs or two profiler traces",
    "profile": "capture some steps of a live run, or of a program, with torch.profiler",
    "analyze": "analyze a profiler trace: stage times, idle time, critical path, findings",
    "export": "write the data of a run as JSON, CSV and trace files",
    "validate": "check that the files of a run are complete and consistent",
    "replay": "send what is left in the spool of a run to an OTLP endpoint",
    "metrics": "list all metrics, spans, events and attributes",
    "ui": "serve pages of runs to the browser, updated while they train",
    "report": "write a run as one self-contained HTML file",
    "doctor": "check environment, settings and endpoints; find why data is missing",
    "stack": "start and stop Collector, Prometheus, Alertmanager, trace store and Grafana",
}
"""Help of each command, a module of this folder: ``DESCRIPTION``, ``EPILOG``, ``add_arguments(parser)``, ``run(args) -> int``."""

FORMER = {"artifacts": "export", "check": "validate", "catalog": "metrics"}
"""Former names of commands, accepted until version 0.2."""

BEFORE_A_PROGRAM = ("profile",)
"""Commands that take a program after ``--``. It is split off before argparse, which drops the two dashes."""

WITH_PROGRAMS = ("run", "demo", "stack")
"""Commands that handle Ctrl-C themselves: they start processes, which get the signal as well."""

DESCRIPTION = """\
Measures PyTorch training: the time of each stage per step, loader and rank, and the bottleneck.

Without a code change:

  otel-train run train.py

Or with one line before the loop:

  import otel_train
  otel_train.instrument(model, {"train": train_loader, "val": val_loader})
"""
EPILOG = """\
examples:
  otel-train demo                        a first run, on text that comes with Python
  otel-train run train.py --epochs 3     a script without a change
  otel-train summary runs/20260131-x7    its run summary; --json for scripts
  otel-train postmortem 20260131-x7      last step and open stage after a crash
  otel-train analyze trace.json.gz       where the time of a profiler trace goes, and advice
  otel-train compare runs/a runs/b       which stages are slower; --fail-if-slower 5% for CI
  otel-train ui                          all runs in the browser
  otel-train report runs/20260131-x7     one HTML file: timeline, histograms, captures
  otel-train doctor                      packages, settings, delivery of metrics
  otel-train replay runs/20260131-x7     send what the Collector has missed

RUN is a run directory or the id of a run below runs/ (setting: run_dir). Default: the newest run.
'otel-train COMMAND --help' shows the options of a command.
Exit codes: 0 success, 1 partial success or a failed check, 2 error, 130 Ctrl-C.
"""
FAILED, BROKEN_PIPE, INTERRUPTED = 2, 141, 130  # the last two: 128 and the signal's number, as in a shell

_RETURN_S = 0.5
"""Interval at which a pending Ctrl-C is looked for. A system call that still blocks after one to two of them is given up."""

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to a full disk. Without a file name it was to standard output: commands report errors of their files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Every error is one line on stderr; ``OTEL_TRAIN_DEBUG=1`` shows the traceback of one that is not an ``OtelTrainError``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has: paths may be undecodable
    try:
        try:
            code = _run(words, is_process=argv is None)
        finally:  # also after SystemExit, which argparse raises
            if sys.stdout is not None:
                sys.stdout.flush()
    except OtelTrainError as error:
        complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE
    except Exception as error:  # a damaged file, or a machine without memory or disk space, may cause any
        if isinstance(error.__cause__, KeyboardInterrupt):  # in __set_name__, before Python 3.12
            return INTERRUPTED
        if os.environ.get(DEBUG_VARIABLE):
            raise
        is_full = isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS and error.filename is None
        if is_full:
            _forget_stdout()
        complain(f"standard output cannot be written: {error}" if is_full else unexpected(error))
        return FAILED
    return code


def unexpected(error: Exception) -> str:
    """Returns the message to the user about an error that is not an ``OtelTrainError``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "otel_train" in frame.filename]
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    problem = f"unexpected {type(error).__name__}{where}: {error}".rstrip(": ")
    return f"{problem}. {_cause(error)}; {DEBUG_VARIABLE}=1 shows the traceback"


def _cause(error: Exception) -> str:
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if no_memory or (isinstance(error, ImportError) and "failed to map segment" in str(error)):
        return (
            "No memory is left: raise the limit that this command runs under (ulimit -v, or its container's)"
        )
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return "The working directory is gone: change to a folder that exists"
    return "A file that this command reads may be damaged ('otel-train validate' checks them)"


def _run(words: list[str], *, is_process: bool) -> int:
    name = next((word for word in words if not word.startswith("-")), "")
    if name in FORMER:
        words[words.index(name)] = FORMER[name]
        complain(f"'{name}' is now '{FORMER[name]}'; version 0.2 refuses the former name")
        name = FORMER[name]
    parser, command = parser_of(name)
    close = "" if name in COMMANDS or words[:1] != [name] else near(name, COMMANDS)
    if close:
        parser.error(f"{shown(name)}: there is no such command. Did you mean '{close}'?")
    at = words.index("--") if name in BEFORE_A_PROGRAM and "--" in words else len(words)
    args = parser.parse_args(words[:at])
    if name in BEFORE_A_PROGRAM:
        args.program = words[at + 1 :]  # its words may look like options of the command
    if args.command is None:
        parser.print_help(sys.stderr)
        return FAILED
    starts = name in WITH_PROGRAMS or (name in BEFORE_A_PROGRAM and command.starts_program(args))
    starts_none = is_process and not starts
    if starts_none:
        with suppress(RuntimeError):  # no thread can be started
            daemon_thread(_end_if_sigint_pends, "otel-train-ctrl-c").start()
    try:
        return int(command.run(args))
    except KeyboardInterrupt:
        if starts_none:
            _end_if_threads_block()
        raise


def _end_if_sigint_pends() -> None:
    """Ends the process if SIGINT stays pending; runs on a thread that blocks signals.

    It stays pending while the main thread is in an uninterruptible system call, which on a hung disk never returns.
    """
    pends = False
    while True:
        time.sleep(_RETURN_S)
        pended, pends = pends, signal.SIGINT in signal.sigpending()
        if pended and pends:
            _end_at_once()


def _end_if_threads_block() -> None:
    """Ends the process after Ctrl-C if a non-daemon thread goes on, as one of ``ui`` that reads a file: Python would join it."""
    until_s = time.monotonic() + _RETURN_S
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                _end_at_once()


def _end_at_once() -> NoReturn:
    complain("interrupted in a system call that does not return: a disk may not answer")
    os._exit(INTERRUPTED)


def parser_of(asked: str) -> tuple[argparse.ArgumentParser, Any]:  # Any: the module of the command
    """Returns the parser, and the module of the selected command: only the options of that command are defined."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("otel-train", None, DESCRIPTION, EPILOG, formatter_class=raw)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command: Any = None
    for name, meaning in COMMANDS.items():
        added = subparsers.add_parser(name, help=meaning, formatter_class=raw)
        if name == asked:
            # Only the selected command is imported: the list of commands needs the imports of none.
            command = import_module(f"otel_train.cli.{name}")
            added.description, added.epilog = command.DESCRIPTION, command.EPILOG
            command.add_arguments(added)
    return parser, command


class _Parser(argparse.ArgumentParser):
    """Parser of the command and of its subcommands, which reports it if the help cannot be written."""

    def print_help(self, file: Any = None) -> None:  # the method of argparse ignores an OSError of the write
        """Prints the help; an error of the write is raised, as for any output of a command."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Prints the error without the control characters of the arguments that it repeats."""
        super().error(printable(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments with the usage of the subcommand: argparse would print that of ``otel-train``."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"otel-train {version('otel-train')}")
        except PackageNotFoundError:
            print("otel-train (run from its sources, not installed)")
        parser.exit()


def _forget_stdout() -> None:
    """Redirects standard output, which cannot be written any more, to /dev/null: Python flushes it again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
