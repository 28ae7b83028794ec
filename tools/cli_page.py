"""Writes docs/reference/cli.md from the parsers of the commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train.cli import main  # noqa: E402 - the checkout's own, installed or not
from tools.generated import write_or_check  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = ROOT / "docs" / "reference" / "cli.md"
HEAD = """\
<!-- Generated from otel_train/cli/ by `python tools/cli_page.py --write`. -->

# Command line

`otel-train COMMAND`, or `python -m otel_train COMMAND`. `otel-train COMMAND --help` also has explanations and examples.

RUN is a run directory, the folder of one of its ranks, or the id of a run below `runs/` ([setting](settings.md) `run_dir`).
Default: the newest run.

| Command | Does |
| --- | --- |
"""
PAGES = {
    "run": "howto/zero-code.md",
    "demo": "tutorial/first-run.md",
    "summary": "reference/summary.md",
    "postmortem": "howto/after-a-crash.md",
    "compare": "reference/comparison.md",
    "profile": "howto/profiler.md",
    "analyze": "howto/analyze-a-trace.md",
    "export": "howto/export-artifacts.md",
    "validate": "howto/export-artifacts.md",
    "replay": "howto/export-otlp.md",
    "metrics": "reference/metrics.md",
    "ui": "howto/ui.md",
    "report": "howto/ui.md",
    "doctor": "howto/troubleshooting.md",
    "stack": "howto/run-the-stack.md",
}
TAIL = """
`otel-train --version` prints the version.

## Exit codes

| Code | Means |
| --- | --- |
| 0 | success |
| 1 | `summary`, `postmortem`, `report`: the file of a rank is damaged; `replay`: requests were kept or refused, with `--verify`: or are missing; `profile`: some ranks or steps were not captured; `compare --fail-if-slower`: steps are slower; `validate`: faults; `stack status`: a part is not ready; `doctor`: warnings |
| 2 | wrong arguments, no such run, an unexpected error; `doctor`: problems |
| that of the program | `run`, `profile -- PROGRAM`; `run` ends by the same signal as the program |
| 130 | Ctrl-C; `demo` ends with 0 |
| 141 | the reader of standard output has closed it, as `head` does |

An error is one line on standard error. `OTEL_TRAIN_DEBUG=1` prints the traceback of an unexpected error instead.

## Output

A run prints its run summary to standard error, `otel-train summary` to standard output, in 60 to 120 columns. `NO_COLOR`,
`FORCE_COLOR`, `TERM` and `COLUMNS` are honoured.
"""


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the arguments that a parser takes."""
    return parser._actions  # noqa: SLF001 - argparse has no public list of them


def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, or the main parser for an empty name."""
    parser, _ = main.parser_of(command)
    (subparsers,) = (action.choices for action in actions_of(parser) if isinstance(action.choices, dict))
    chosen: argparse.ArgumentParser = subparsers[command] if command else parser
    return chosen


def page() -> str:
    """Returns the text of the page."""
    text = HEAD
    for name, does in main.COMMANDS.items():
        text += f"| `otel-train {name}` | {does}: [{Path(PAGES[name]).stem}](../{PAGES[name]}) |\n"
    text += "\n## Options\n\n| Command | Option | Meaning |\n| --- | --- | --- |\n"
    for name in main.COMMANDS:
        shown = ""
        for command, option, meaning in options(parser_of(name)):
            text += f"| {'' if command == shown else f'`{command}`'} | `{option}` | {meaning} |\n"
            shown = command
    return text + TAIL


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Returns (command, option, help text) of a parser and its subcommands, without options that ``--help`` hides."""
    command = parser.prog.removeprefix("otel-train ")
    for action in actions_of(parser):
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from options(below)
        elif action.help and action.help != argparse.SUPPRESS and action.dest != "help":
            default = str(action.default).replace(str(Path.home()), "~")
            value = "|".join(action.choices) if action.choices else str(action.metavar or "")
            name = " ".join([", ".join(action.option_strings), value]).strip()
            yield command, name.replace("|", "\\|"), action.help % {"default": default}


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, says=__doc__))
