"""``otel-train demo``: trains a small model with instrumentation."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from otel_train.cli.arguments import amount, at_least
from otel_train.errors import ConfigError, require

DESCRIPTION = "Train a small character transformer on text that comes with Python, with instrumentation."
EPILOG = """\
Training mixes two loaders: 'code' reads the sources of the standard library file by file, 'prose' the language
reference from memory. Each read of 'code' takes 4 ms more, as from a network file system, so the run summary names
'code' as the bottleneck. The script is otel_train/demo.py; one line of it calls otel_train.

examples:
  otel-train demo
  otel-train demo --minutes 10           enough time to look at /metrics
  otel-train demo --profiler on --epochs 2 --steps-per-epoch 50
  otel-train demo --workers 2            read 'code' in two processes, beside the training
  OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 otel-train demo

Ctrl-C ends training early, prints the run summary and gives exit code 0.
"""
ENDPOINTS = [f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT" for signal in ("", "METRICS_", "TRACES_")]

PASSED_ON = ("minutes", "steps", "epochs", "steps_per_epoch", "seed", "device", "workers")
"""Options that are passed on to the script ``otel_train/demo.py`` under the same names."""

MOST_MINUTES, MOST_WORKERS = 60 * 24, 256

PROFILER: Final[dict[str | None, dict[str, str]]] = {
    None: {},
    "off": {"OTEL_TRAIN_DISABLED": "true"},
    "on": {
        "OTEL_TRAIN_ARTIFACTS": "true",
        "OTEL_TRAIN_PROFILER_EVERY": "epochs=1",
        "OTEL_TRAIN_PROFILER_SCHEDULE": "repeat=1",
    },
}
"""Environment variables that ``--profiler`` sets, by its value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    minutes = amount("minutes", MOST_MINUTES, above=True)
    add("--minutes", type=minutes, default=1.0, metavar="M", help="train for M minutes (default: 1)")
    add("--steps", type=at_least(0), default=0, metavar="N", help="stop after N updates, if that is sooner")
    add("--epochs", type=at_least(1), default=0, metavar="N", help="train N epochs, without a time limit")
    per_epoch = "updates per epoch (default: 100)"
    add("--steps-per-epoch", type=at_least(1), default=100, metavar="N", help=per_epoch)
    profiler = "on: capture some steps and write artifacts; off: no instrumentation"
    add("--profiler", choices=["on", "off"], help=profiler)
    add("--seed", type=at_least(0), default=0, metavar="S", help="seed of weights and shuffling (default: 0)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="device to train on (default: cpu)")
    workers = "worker processes of the loader 'code' (default: 0)"
    add("--workers", type=at_least(0, MOST_WORKERS), default=0, metavar="W", help=workers)
    add("--run-dir", metavar="D", help="folder in which the run directory is created (default: runs)")


def run(args: argparse.Namespace) -> int:
    """Trains, then prints the run summary and what to try next."""
    require("tqdm", extra="demo")
    torch: Any = require("torch", extra="demo")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: torch sees no CUDA device here. Use --device cpu")
    # The script has no options for settings of otel_train: it takes them from the environment, as any training program.
    if args.run_dir:
        os.environ["OTEL_TRAIN_RUN_DIR"] = args.run_dir
    os.environ.update(PROFILER[args.profiler])
    os.environ.setdefault("OTEL_TRAIN_RUN_NAME", "demo")
    what = "Training a character transformer on Python's own text."
    print(f"{what} Ctrl-C ends it early, with the run summary.", flush=True)
    with tempfile.TemporaryDirectory(prefix="otel-train-demo-") as folder:
        words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED_ON]
        # By name: import-linter lets no module of the package import the demo, which stands for a user's program.
        script: Any = import_module("otel_train.demo")
        script.main([*words, f"--checkpoint={Path(folder) / 'character_transformer.pt'}"])
        summary = _close()
    if args.profiler != "off":
        artifacts = args.profiler == "on"
        closing = closing_text(
            summary, os.environ, artifacts=artifacts, workers=args.workers, command=command_line()
        )
        print(closing, end="")
    return 0


def command_line() -> str:
    """Returns the command that starts otel-train in this shell: its name if it is on PATH, else its path."""
    if shutil.which("otel-train"):
        return "otel-train"
    script = Path(sysconfig.get_path("scripts"), "otel-train")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m otel_train"
    is_below = script.is_relative_to(Path.cwd())
    return shlex.quote(str(script.relative_to(Path.cwd()) if is_below else script))


def closing_text(
    summary: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    artifacts: bool = False,
    workers: int = 0,
    command: str = "otel-train",
) -> str:
    """Returns the addresses and paths of the run, and what to try next with ``command``, which depends on the main finding."""
    metrics_url, run_dir = summary.get("metrics_url"), summary.get("run_dir")
    lines = []
    if metrics_url:
        lines.append(f"/metrics was at   {metrics_url}   ({command} demo --minutes 10 leaves time to look)")
    if run_dir:
        lines.append(f"Run directory     {run_dir}")
        if artifacts:
            lines.append(f"Artifacts         {Path(str(run_dir)) / 'artifacts'}")
        lines.append(f"The summary again {command} summary {shlex.quote(str(run_dir))}")
    lines += _advice(summary, workers, command)
    if endpoint := next((environ[name] for name in ENDPOINTS if environ.get(name)), None):
        lines.append(f"Exported to       {endpoint}")
    else:
        lines.append("Export as well    set OTEL_EXPORTER_OTLP_ENDPOINT, such as http://127.0.0.1:4318")
    return "".join(f"{line}\n" for line in lines)


def _advice(summary: Mapping[str, Any], workers: int, command: str) -> list[str]:
    finding: Mapping[str, Any] = next(iter(summary.get("findings") or ()), {})
    if finding.get("name") == "too_early":
        return [f"Let it run longer {command} demo --minutes 1"]
    if finding.get("name") == "input_bound" and finding.get("loader") == "code":
        advised = [int(number) for number in re.findall(r"num_workers=(\d+)", str(finding.get("advice")))]
        enough = max(advised, default=0)
        return [f"Follow the advice {command} demo --workers {enough}"] if enough > workers else []
    return [f"Without workers   {command} demo"] if workers else []


def _close() -> Mapping[str, Any]:
    """Closes the script's session, which prints the run summary; returns the summary."""
    import otel_train

    session = otel_train.current()
    if session is None:
        return {}
    summary: Mapping[str, Any] = session.summary()
    session.close()
    return summary
