"""``otel-train run``: runs a program with instrumentation."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_train.cli import complain
from otel_train.cli.arguments import FormerOption
from otel_train.config.deprecated import FORMER
from otel_train.config.settings import DEFAULTS, settings_in, unknown
from otel_train.config.validation import FILE_VARIABLE, variable_of
from otel_train.errors import ConfigError, OtelTrainError

if TYPE_CHECKING:
    from otel_train.agent.rank_end import RankEnd


DESCRIPTION = "Run a training program with instrumentation, without a change to its code."
EPILOG = """\
The program runs as without otel-train: same interpreter, sys.argv, __main__, sys.path, standard input and output,
signals and exit code. DataLoaders, models, backward and optimizers are instrumented when it trains, also in child
processes (torchrun, mp.spawn, accelerate launch, scripts that start themselves again). Processes that do not train
are not instrumented. Loaders are named after the variable that holds them. A JAX program has to wrap its step with
otel_train.jax.make_step. A program that calls otel_train.instrument() itself keeps its names and settings.

When the program is killed, its remaining data and end state are exported.

examples:
  otel-train run train.py --epochs 3
  otel-train run -m package.train --epochs 3
  otel-train run --run-name baseline --endpoint http://127.0.0.1:4318 train.py
  otel-train run --config settings.yaml train.py
  otel-train run --set export_interval_s=5 --set prometheus=false train.py
  otel-train run torchrun --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m otel_train run train.py
  otel-train run accelerate launch train.py

Options before the program are those of otel-train, options after it those of the program. All settings are in
docs/reference/settings.md. OTEL_TRAIN_DISABLED=true runs the program without instrumentation.

Exit code: that of the program, or its signal. 2: a setting is wrong or the program does not exist; nothing was run.
"""

OPTIONS: Final = {
    "run_name": ("NAME", "name of the run, for display"),
    "run_id": (
        "ID",
        "id of the run, the same on all ranks and after restarts (default: from the launcher, else new)",
    ),
    "run_dir": ("D", "folder in which the run directory is created (default: runs)"),
    "prometheus_address": (
        "HOST:PORT",
        "address of /metrics; port 0: any free port (default: 127.0.0.1:9464)",
    ),
    "export_interval_s": ("S", "seconds between exports of metrics (default: 15)"),
    "log_every_steps": ("N", "print progress every N steps"),
}
"""Settings that have their own option: the name of the value in the help, and the help text."""

FORMER_OPTIONS: Final = ("prometheus_port", "export_every_s")
"""Former names of settings, still accepted as options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.usage = "otel-train run [options] (PROGRAM | -m MODULE) [arguments of the program]"
    parser.allow_abbrev = False
    add = parser.add_argument
    for name, (value, meaning) in OPTIONS.items():
        add(f"--{name.replace('_', '-')}", metavar=value, help=meaning)
    for name in FORMER_OPTIONS:
        add(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)
    add("--endpoint", metavar="URL", help="OTLP endpoint, such as http://127.0.0.1:4318")
    add("--config", metavar="FILE", help="YAML file with settings")
    add("--no-prometheus", action="store_true", help="do not serve /metrics")
    add("--no-summary", action="store_true", help="do not print the run summary at the end")
    hidden = argparse.SUPPRESS
    add("--no-card", dest="no_summary", action=FormerOption, nargs=0, default=False, help=hidden)
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="set any setting; may be repeated")
    rest = argparse.REMAINDER
    add("-m", dest="module", metavar="MODULE", nargs=rest, help="run a module, as python -m does")
    add("program", metavar="PROGRAM", nargs=rest, help="script or command to run")


def run(args: argparse.Namespace) -> int:
    """Runs the program; returns its exit code, or ends by the signal that ended the program."""
    from otel_train.autoinstrument import runner

    if args.module is not None:
        module, words = "".join(args.module[:1]), args.module[1:]
    else:
        module, words = None, args.program[1:] if args.program[:1] == ["--"] else args.program
    return runner.end_like(launched(words, environment_of(args), module=module))


def launched(words: Sequence[str], settings: Mapping[str, str], *, module: str | None = None) -> int:
    """Runs a program with these environment variables, waits for its agents, and returns its exit code, or -n after signal n."""
    from otel_train.agent.rank_end import wait_for_ends
    from otel_train.autoinstrument import runner

    if module is not None and not module:
        raise ConfigError("-m: expected the name of a module")
    line = runner.command_line(words, module=module or "", flags=runner.interpreter_flags(sys.orig_argv))
    folder = _folder()
    ends: list[RankEnd] = []
    try:
        environ = runner.environment(os.environ, settings, folder)
        if flag := runner.unreachable(line):
            complain(f"python {flag} prevents instrumentation; the program runs without it. Leave {flag} out")
        try:
            code = runner.start_and_wait(line, environ, lambda: ends.extend(wait_for_ends(folder)))
        except OSError as error:
            raise ConfigError(f"{line[0]} cannot be started: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print_ends(ends)
    return code


def _folder() -> Path:
    """Makes the folder in which agents write how their ranks ended; if that fails, returns a path below /dev/null: none can exist."""
    try:
        return Path(tempfile.mkdtemp(prefix="otel-train-"))
    except OSError as error:
        complain(f"no temporary folder ({error}); how a killed rank ended will not be printed. Set TMPDIR")
        return Path(os.devnull) / "otel-train"


def _print_ends(ends: Sequence[RankEnd]) -> None:
    from otel_train.cli.postmortem import headline
    from otel_train.rundata.flight import read_postmortem

    for end in ends:
        try:
            sentence, command = headline(read_postmortem(end.rank_path)), "postmortem"
        except OtelTrainError as error:
            sentence, command = f"rank {end.rank} is gone ({error})", "summary"
        lost = f", {end.lost} events had been overwritten" if end.lost else ""
        complain(f"{sentence}; {end.steps} steps exported{lost}")
        complain(f"more: otel-train {command} {shlex.quote(str(end.rank_path))}")


def _refuse_wrong(given: Mapping[str, str], by_name: Sequence[str]) -> None:
    """Raises ConfigError for a wrong value; the message names its option. ``by_name``: settings given with ``--set``."""
    for name, value in given.items():
        for ignored in settings_in({variable_of(name): value}).ignored:
            option = f"--set {name}" if name in by_name else f"--{name.replace('_', '-')}"
            raise ConfigError(ignored.problem.replace(variable_of(name), option))


def environment_of(args: argparse.Namespace) -> Mapping[str, str]:
    """Returns the environment variables for the given options."""
    options = (*OPTIONS, *FORMER_OPTIONS)
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    for item in args.set:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected NAME=VALUE, such as --set export_interval_s=5")
        if name not in DEFAULTS and name not in FORMER:
            raise ConfigError(f"--set {item}: {unknown(name)}")
        given[name] = value
    _refuse_wrong(given, [item.partition("=")[0] for item in args.set])
    if args.no_prometheus:
        given["prometheus"] = "false"
    if args.no_summary:
        given["console"] = "false"
    found = {variable_of(name): value for name, value in given.items()}
    if args.config:
        found[FILE_VARIABLE] = args.config
    if args.endpoint:
        found["OTEL_EXPORTER_OTLP_ENDPOINT"] = args.endpoint
    return found
