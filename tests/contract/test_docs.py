"""What the pages say exists: links, targets, commands, settings, code."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import otel_train
from otel_train.cli import main as command_line
from otel_train.config.deprecated import FORMER
from otel_train.config.settings import DEFAULTS, Config, ProfilerEvery, ProfilerSchedule, Tuning
from otel_train.config.sources import resolve
from otel_train.config.validation import PREFIX, RESERVED
from tests.support.zero_code import environment, printed_by
from tools.cli_page import actions_of, parser_of

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[(?:[^\]]|\n)*?\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?:^|[\s(])make ([a-z][a-z-]*)")
COMMAND = re.compile(r"otel-train ((?:[a-z]+)\b)?([^\n|#]*)")
ELSEWHERE = ("http://", "https://")
CALLS = {"instrument", "Config"}
OTHER_KEYWORDS = {"model", "loaders", "config", "config_file", "meter_provider", "tracer_provider"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def code_of(page: Path) -> list[str]:
    """Everything on a page that is set as code: blocks, and words in backticks."""
    text = page.read_text(encoding="utf-8")
    return [code for _, code in FENCE.findall(text)] + INLINE_CODE.findall(FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def targets() -> frozenset[str]:
    lines = re.findall(
        r"^([a-z][a-z -]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    return frozenset(name for line in lines for name in line.split())


@cache
def options(command: str) -> frozenset[str]:
    """The options that a command takes, those of the commands below it and former ones included."""
    return frozenset(_option_strings(parser_of(command)))


def _option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in actions_of(parser):
        yield from action.option_strings
        if parser.prog.count(" ") and isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _option_strings(below)


def _snippets() -> Iterator[Any]:
    for page in PAGES:
        for number, code in enumerate(blocks(page, "python"), 1):
            yield pytest.param(code, id=f"{name_of(page)}-{number}")


SNIPPETS = list(_snippets())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    """A reader who follows a dead link stops reading."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    dead = []
    for link in LINK.findall(text):
        if link.startswith(ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(link)

    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_on_a_page_exists(page: Path) -> None:
    """The first thing people do with a page is paste from it."""
    named = {target for code in code_of(page) for target in MAKE.findall(code)}

    assert named <= targets()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_on_a_page_exists_with_its_options(page: Path) -> None:
    """As above; an option that was renamed is as bad as a command that was."""
    wrong = []
    for code in code_of(page):
        for command, rest in COMMAND.findall(code):
            if page.name == "CHANGELOG.md" and command in command_line.FORMER:
                continue
            if command and command not in command_line.COMMANDS:
                wrong.append(command)
                continue
            known = options(command)
            if command == "run":  # what comes after the program is the program's own
                rest = re.split(r"\s(?:-m\b|\S+\.py\b|torchrun\b|accelerate\b)", rest)[0]  # noqa: PLW2901 - less of the same
            own = rest.split(" -- ")[0]
            wrong += [
                f"{command} {flag}" for flag in re.findall(r"(?<!\S)--[a-z-]+", own) if flag not in known
            ]

    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_setting_on_a_page_exists(page: Path) -> None:
    """A wrong name would be refused at `instrument()`; a page must not lead there."""
    text = page.read_text(encoding="utf-8")
    variables = set(re.findall(rf"\b{PREFIX}[A-Z][A-Z_]*[A-Z]\b", text))
    known = {PREFIX + name.upper() for name in DEFAULTS} | RESERVED
    keywords = {
        keyword.arg
        for code in blocks(page, "python")
        for call in ast.walk(ast.parse(code))
        if isinstance(call, ast.Call) and isinstance(call.func, (ast.Name, ast.Attribute))
        if (call.func.id if isinstance(call.func, ast.Name) else call.func.attr) in CALLS
        for keyword in call.keywords
    }
    inline = {
        found[1] for code in INLINE_CODE.findall(text) if (found := re.fullmatch(r"([a-z_]+)=\S+", code))
    }

    assert variables <= known
    assert keywords - {None} <= set(DEFAULTS) | OTHER_KEYWORDS
    if page.name == "CHANGELOG.md":
        inline -= FORMER.keys()
    # A keyword in backticks is a setting, a part of one, an argument of something else that is public, or a label.
    parts = {*ProfilerSchedule._fields, *ProfilerEvery._fields, *Tuning._fields}
    arguments = {"config_file", "samples", "tokens", "start", "num_workers", "phase", "name"}
    assert inline <= {*DEFAULTS, *parts, *arguments, "capture"}


@pytest.mark.parametrize(
    "command",
    [
        "-m grafana.build",
        "deploy/kubernetes/build.py",
        "tools/alerts_pages.py",
        "tools/catalog_pages.py",
        "tools/cli_page.py",
        "tools/findings_page.py",
        "tools/loops_page.py",
        "tools/settings_page.py",
    ],
)
def test_what_is_generated_is_fresh(command: str) -> None:
    """Pages, dashboards and objects for Kubernetes are read in place of the code; a stale one promises what is gone."""
    printed_by(*command.split(), "--check", folder=ROOT)


def test_every_public_name_is_in_the_api_reference() -> None:
    """A public name that is not described is not found."""
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")

    assert [name for name in otel_train.__all__ if f"`{name}" not in page] == []


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_python_block_compiles(code: str) -> None:
    """Code on a page is reviewed less carefully than code in a module."""
    compile(code, "page", "exec")


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_name_of_otel_train_in_a_python_block_exists(code: str) -> None:
    """A block that compiles may still call what is not there."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "otel_train"
    }

    assert used <= {*otel_train.__all__, *otel_train._PACKAGES}


def run_in(folder: Path, code: str) -> dict[str, Any]:
    """Run a block as a program of its own; the summary that it leaves."""
    (folder / "train.py").write_text(code, encoding="utf-8")
    printed_by("train.py", environ=environment(OTEL_TRAIN_PROMETHEUS_ADDRESS="127.0.0.1:0"), folder=folder)
    (summary,) = folder.glob("runs/*/rank0/summary.json")
    values: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    return values


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ten_line_start_runs_and_is_observed(tmp_path: Path) -> None:
    """It is the first code that a new user runs."""
    start = blocks(ROOT / "README.md", "python")[0]

    values = run_in(tmp_path, start)

    assert len([line for line in start.splitlines() if line]) <= 10
    assert values["steps"] == {"train": 64}
    assert values["batches"] == {"train": 64}
    assert values["instrumentation_gaps"] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("fix-a-bottleneck", ["-m", "otel_train", "run", "train.py", "0"]),
        ("dataloader-bottleneck", ["train.py"]),
    ],
)
def test_the_example_of_a_slow_loader_has_the_finding_on_its_page(
    page: str, words: list[str], tmp_path: Path
) -> None:
    """A reader runs it and compares: the number of milliseconds is the machine's, the rest is not."""
    path = ROOT / f"docs/howto/{page}.md"
    (tmp_path / "train.py").write_text(blocks(path, "python")[0], encoding="utf-8")
    printed = printed_by(
        *words, environ=environment(OTEL_TRAIN_PROMETHEUS_ADDRESS="127.0.0.1:0"), folder=tmp_path
    )
    (summary,) = tmp_path.glob("runs/*/rank0/summary.json")
    finding = json.loads(summary.read_text(encoding="utf-8"))["findings"][0]

    assert (finding["name"], finding["loader"]) == ("input_bound", "train")
    for text in ("input_bound", "Training waits for loader `train`: ", "(num_workers=0): DataLoader(..."):
        assert text in blocks(path, "text")[0]
    if page == "dataloader-bottleneck":
        assert printed.splitlines()[0] == blocks(path, "text")[0].splitlines()[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_counts_what_it_says(tmp_path: Path) -> None:
    """The page says 384 training batches and 12 of evaluation: a reader compares."""
    script = blocks(ROOT / "docs/tutorial/first-run.md", "python")[0]

    values = run_in(tmp_path, script)

    assert values["batches"] == {"train": 384, "val": 12}
    assert values["steps"]["train"] == 384
    assert values["steps"]["eval"] == 12


def test_every_spelling_on_the_settings_page_is_read_as_the_default(tmp_path: Path) -> None:
    """Each cell of the table is something to paste."""
    page = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([a-z_]+=[^`]*)` \| `([A-Z_]+=[^`]*)` \| `([^`]*)` \| `([^`]*)` \|", page, re.MULTILINE
    )
    code, variables, yaml, toml = ("\n".join(column) for column in zip(*rows, strict=True))
    (tmp_path / "settings.yaml").write_text(yaml, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(f"[tool.otel_train]\n{toml}", encoding="utf-8")
    environ = dict(line.split("=", 1) for line in variables.splitlines())
    keywords = {call.arg: ast.literal_eval(call.value) for call in _keywords(code)}

    assert len(rows) == len(DEFAULTS)
    assert keywords == DEFAULTS
    assert Config.from_env(environ) == Config()
    resolved = resolve(config_file=tmp_path / "settings.yaml", environ={}, folder=tmp_path)
    assert resolved.config == Config()
    assert set(resolved.origins) == set(DEFAULTS)


def _keywords(code: str) -> list[ast.keyword]:
    call = ast.parse(f"call({', '.join(code.splitlines())})", mode="eval").body
    assert isinstance(call, ast.Call)
    return call.keywords
