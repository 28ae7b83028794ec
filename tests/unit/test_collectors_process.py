"""Memory, CPU and files of the process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder
from otel_train.collectors.process import ProcessReader

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def cgroup(root: Path, *, limit: str, used: int, inactive: int = 0) -> Path:
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return root


def test_readings_are_those_of_this_process(tmp_path: Path) -> None:
    """In base units, and close to what other tools read."""
    builder = MetricBuilder()
    ProcessReader(tmp_path).write(builder)
    found = {family.metric.name: family for family in builder.families()}
    resident = getattr(found[c.PROCESS_MEMORY_USAGE.name].points[0], "value", 0)

    assert resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert len(found[c.PROCESS_CPU_TIME.name].points) == 2
    assert c.HOST_MEMORY_LIMIT.name in found


def test_the_limit_of_a_control_group_is_the_hosts(tmp_path: Path) -> None:
    """In a container the OOM killer counts from there; cache that can be dropped does not count."""
    reader = ProcessReader(cgroup(tmp_path, limit=str(64 * MIB), used=50 * MIB, inactive=20 * MIB))

    assert reader.host_memory() == (30 * MIB, 64 * MIB)


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_limit_the_machine_is(tmp_path: Path, limit: str) -> None:
    """A limit of 2**63 is none."""
    used, total = ProcessReader(cgroup(tmp_path, limit=limit, used=50 * MIB)).host_memory()

    assert total == psutil.virtual_memory().total
    assert 0 < used < total


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    """Workers end between two looks."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    assert ProcessReader(tmp_path).rss_of(pid) == 0
    assert ProcessReader(tmp_path).rss_of(os.getpid()) > MIB
