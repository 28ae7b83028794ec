"""``otel-train profile -- PROGRAM``: run it with a capture of some steps, and write its artifacts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.artifacts.writer import OPS, write
from otel_train.cli import artifacts
from otel_train.cli.run import launched
from otel_train.errors import ConfigError, RunDirectoryError
from otel_train.exporters.run_directory import folder_name
from otel_train.profiler.requests import activities
from otel_train.runinfo import detect
from otel_train.sources import settle
from otel_train.values import PREFIX

if TYPE_CHECKING:
    import argparse

SKIPPED_STEPS = 5
"""Steps before the capture: compilers, allocators and caches need some to settle."""

TURN_S = 0.1
"""Programs that are profiled may be over soon: looked at more often, they are captured in time."""

DEMO_STEPS_BESIDE = 60
"""Steps of the demo beside those that are captured."""


def run(args: argparse.Namespace) -> int:
    """Run the program, or the demo where none is given; how it ended, or 1 if nothing was captured.

    Raises:
        ConfigError: a setting cannot be honoured, or there is no such program.
        RunDirectoryError: the program was not observed, or the artifacts cannot be written.
    """
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: expected 1 or more")
    if args.run:
        raise ConfigError(f"{args.run}: give either a live RUN, or a program behind --")
    settings = _settings(args)
    config = settle(environ={**os.environ, **settings}).config
    if config.disabled:
        raise ConfigError("OTEL_TRAIN_DISABLED=true: nothing can be profiled. Take it away")
    run_id = settings[f"{PREFIX}RUN_ID"] = detect(config, os.environ).run_id
    is_module = args.program[:1] == ["-m"]
    if is_module:
        ended = launched(args.program[2:], settings, module="".join(args.program[1:2]))
    elif args.program:
        ended = launched(args.program, settings)
    else:
        ended = launched(_demo(args.steps), settings, module="otel_train")
    home = Path(config.run_dir) / folder_name(run_id)
    if not home.is_dir():
        raise RunDirectoryError(
            f"{home}: the program has left no run there. Did it train, and with no run_id or run_dir of its own?"
        )
    written = write(home, 0, Path(args.output_dir) if args.output_dir else None)
    artifacts.say(written, as_json=args.json)
    if ended.code:
        print(f"otel-train: the program ended with {ended.signal_name or ended.code}", file=sys.stderr)
        return ended.code if ended.code > 0 else 128 - ended.code
    return 1 if "absent" in written.files[OPS] else 0


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """One capture, as soon as the program has warmed up."""
    wanted = {
        "capture": "asked",
        "capture_steps": args.steps,
        "capture_warmup": args.warmup,
        "capture_skip_first": SKIPPED_STEPS,
        "capture_every_epochs": 1,
        "capture_repeat": 1,
        "capture_max_s": args.timeout,
        "capture_activities": ",".join(activities(args.activities)),
        "capture_shapes": args.shapes,
        "capture_stacks": args.stacks,
        "capture_memory": args.memory,
        "capture_flops": args.flops,
        "run_dir": str(Path(args.run_dir).absolute()),
    }
    settings = {PREFIX + name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
                for name, value in wanted.items()}  # fmt: skip
    if not os.environ.get(f"{PREFIX}TURN_EVERY_S"):
        settings[f"{PREFIX}TURN_EVERY_S"] = str(TURN_S)
    return settings


def _demo(steps: int) -> list[str]:
    return ["demo", "--epochs", "1", "--steps-per-epoch", str(steps + DEMO_STEPS_BESIDE)]
