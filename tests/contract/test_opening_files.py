"""Files below a run directory are opened by ``otel_train.files`` alone: no other module meets a hostile file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import otel_train

PACKAGE = Path(otel_train.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
READING = {"read_text", "read_bytes", "write_text", "write_bytes", "open", "copyfile", "copytree"}
OPENERS = {
    "open",
    "os.open",
    "io.open",
    "gzip.open",
    "json.load",
    "json.loads",
    "np.fromfile",
    "np.load",
    "np.memmap",
}

ELSEWHERE = {
    "agent/process.py": "/proc",
    "agent/messages.py": "control groups",
    "agent/rank_end.py": "/proc",
    "agent/ring_reader.py": "names in shared memory",
    "trace_analysis/reader.py": "events of a trace that has been read",
    "distributed/rank_report.py": "a record that ranks leave in the job's store",
    "profiler/": "the profiler's own files, and the body of a request",
    "cli/doctor.py": "a token file that an option names",
    "cli/main.py": "the null device",
    "cli/stack.py": "logs of the stack",
    "demo.py": "texts that come with Python",
    "doctor/checks.py": "answers over http",
    "exporters/otlp_response.py": "answers over http",
    "exporters/otlp_json.py": "a line of the spool that has been read",
    "exporters/otlp_transport.py": "certificates that variables name; a line of the spool that has been read",
    "collectors/process.py": "/proc",
    "exporters/manager.py": "its own method of that name",
    "files.py": "this is the module",
    "autoinstrument/runner.py": "the program that is started",
    "resource.py": "/proc",
    "instrumentation/accelerator.py": "/proc",
    "instrumentation/logged_values.py": "an event in shared memory",
    "instrumentation/manager.py": "/sys",
    "stack/": "the state of the stack",
    "rundata/schemas.py": "files of the package",
    "ui/components.py": "files of the package",
}
"""Modules that open something else."""


def name_of(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def opened_in(module: Path) -> list[str]:
    """Calls that open or parse a file, one a line."""
    return [f"{name_of(module)}:{found}" for found in opened_in_text(module.read_text(encoding="utf-8"))]


def opened_in_text(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called in OPENERS or (method in READING and not called.startswith("self.")):
            found.append(f"{node.lineno}: {called}")
    return found


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_a_module_opens_files_of_a_run_directory_by_the_module_for_them(module: Path) -> None:
    """A single ``path.open()`` follows a link, blocks on a pipe or reads a device."""
    if not name_of(module).startswith(tuple(ELSEWHERE)):
        assert opened_in(module) == []


def test_the_rule_sees_what_it_forbids_and_every_exception_is_needed(tmp_path: Path) -> None:
    """A rule that finds nothing proves nothing."""
    slip = tmp_path / "slip.py"
    slip.write_text(
        "path.read_text()\nopen(path)\nos.open(path, 0)\njson.loads(x)\n(a / b).open('rb')\nself.open()\n"
    )
    needed = {
        name
        for name in ELSEWHERE
        for module in MODULES
        if name_of(module).startswith(name) and opened_in(module)
    }

    assert len(opened_in_text(slip.read_text())) == 5
    assert needed == set(ELSEWHERE)
