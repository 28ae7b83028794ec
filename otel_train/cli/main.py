"""The ``otel-train`` command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from otel_train.config.validation import DEBUG_VARIABLE
from otel_train.errors import OtelTrainError
from otel_train.safety import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "run": "run a training script, observed, without touching it",
    "demo": "train a small model on real text, observed; about a minute",
    "summary": "print the run summary of a finished or running run",
    "profile": "capture some steps of a live run, or of a program, with torch.profiler",
    "postmortem": "say what a run was doing when it died",
    "replay": "send what a run could not send to its collector",
    "analyze": "say where the time of a profiler trace goes, and what to change",
    "compare": "say what changed between two traces or two runs",
    "ui": "show runs in the browser, live",
    "report": "write a run as one page of HTML that needs nothing else",
    "export": "write a run's config, metrics, stage times, operators and trace as files",
    "validate": "say whether a run, or its artifacts, are complete and agree",
    "doctor": "find what prevents metrics from being measured or exported",
    "stack": "start Collector, Prometheus, Alertmanager, traces and Grafana",
    "metrics": "print every metric, span and attribute by name",
}
"""Each is a module of this folder with ``DESCRIPTION``, ``EPILOG``, ``add_arguments(parser)`` and ``run(args) -> int``."""

FORMER = {"artifacts": "export", "check": "validate", "catalog": "metrics"}
"""Former names of commands, accepted until version 0.2."""

BEFORE_A_PROGRAM = ("profile",)
"""Commands of which ``-- PROGRAM`` is a part; argparse takes the two dashes away."""

DESCRIPTION = """\
Shows where the time of a PyTorch training run goes.

Without touching your script:

  otel-train run train.py

Or in it, one line before the loop:

  import otel_train
  otel_train.instrument(model, {"train": train_loader, "val": val_loader})
"""
EPILOG = """\
examples:
  otel-train demo                        see it work, on text that comes with Python
  otel-train run train.py --epochs 3     observe a script without touching it
  otel-train summary runs/20260131-x7    the run summary; --json for scripts
  otel-train postmortem 20260131-x7      last step and open stage after a crash
  otel-train analyze trace.json.gz       what a profiler trace says, and what to change
  otel-train compare runs/a runs/b       what became slower; --fail-if-slower 5% for CI
  otel-train ui                          the runs in the browser, live
  otel-train report runs/20260131-x7     one page of HTML: timeline, histograms, captures
  otel-train doctor                      packages, settings, delivery of metrics
  otel-train replay runs/20260131-x7     send what the collector has missed

RUN is a run directory or the id of a run below runs/ (or where the setting run_dir says); without it, the newest run.
'otel-train COMMAND --help' says more. Exit codes: 0 done, 1 in part, 2 not, 130 stopped by Ctrl-C.
"""
FAILED, BROKEN_PIPE, INTERRUPTED = 2, 141, 130  # the last two: 128 and the signal's number, as in a shell


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    Every error is one line on stderr; ``OTEL_TRAIN_DEBUG=1`` shows the traceback of one that is no ``OtelTrainError``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
    except OtelTrainError as error:
        _tell(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE
    except Exception as error:  # whatever a damaged file or a machine at its limits makes of a command
        if os.environ.get(DEBUG_VARIABLE):
            raise
        _tell(unexpected(error))
        return FAILED
    return code


def unexpected(error: Exception) -> str:
    """The message to the user about an error that is no ``OtelTrainError``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "otel_train" in frame.filename]
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return (
        f"{type(error).__name__}: {error}{where}: this command did not expect that. A file that it reads may be damaged "
        f"('otel-train validate' looks); {DEBUG_VARIABLE}=1 shows where it happened"
    )


def _tell(message: str) -> None:
    print(f"otel-train: {printable(' '.join(message.split()))}", file=sys.stderr)


def _run(words: list[str]) -> int:
    asked = next((word for word in words if not word.startswith("-")), "")
    if asked in FORMER:
        words[words.index(asked)] = FORMER[asked]
        _tell(f"'{asked}' is now '{FORMER[asked]}'; version 0.2 refuses the former name")
        asked = FORMER[asked]
    parser, command = _parser(asked)
    at = words.index("--") if asked in BEFORE_A_PROGRAM and "--" in words else len(words)
    args = parser.parse_args(words[:at])
    if asked in BEFORE_A_PROGRAM:
        args.program = words[at + 1 :]  # which may look like options of the command
    if args.command is None:
        parser.print_help(sys.stderr)
        return FAILED
    return int(command.run(args))


def _parser(asked: str) -> tuple[argparse.ArgumentParser, Any]:  # Any: the module of the command asked for
    raw = argparse.RawDescriptionHelpFormatter
    form = partial(raw, max_help_position=16)
    parser = argparse.ArgumentParser("otel-train", None, DESCRIPTION, EPILOG, formatter_class=form)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command: Any = None
    for name, meaning in COMMANDS.items():
        added = subparsers.add_parser(name, help=meaning, formatter_class=raw)
        if name == asked:
            # Only the command asked for is imported: the help of all of them costs nothing.
            command = import_module(f"otel_train.cli.{name}")
            added.description, added.epilog = command.DESCRIPTION, command.EPILOG
            command.add_arguments(added)
    return parser, command


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"otel-train {version('otel-train')}")
        except PackageNotFoundError:
            print("otel-train (run from its sources, not installed)")
        parser.exit()


def _forget_stdout() -> None:
    """The reader has gone. Python flushes stdout once more at exit: let that go nowhere, quietly."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
