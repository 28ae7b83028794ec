"""Memory, CPU and files of a rank, peaks between two instants, and sizes of the program's caches."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_train
from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder
from otel_train.collectors import process
from otel_train.collectors.process import (
    CpuWait,
    MemoryMonitor,
    Peak,
    ProcessReader,
    ProcessTreeReader,
    Reading,
)
from otel_train.datamodel import system_clock
from otel_train.instrumentation.logged_values import CacheSizes
from otel_train.testing import FakeClock
from tests.support.device import FakeDriver

MIB = 2**20


def cgroup(root: Path, *, limit: str, used: int, inactive: int = 0) -> Path:
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return root


def proc_of(root: Path, group: str) -> Path:
    """A folder of processes whose own control group is known."""
    (root / "self").mkdir(parents=True)
    (root / "self" / "cgroup").write_text(f"0::/{group}\n")
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


def test_a_wait_for_a_processor_counts_from_the_first_reading_and_stays_after_the_end(tmp_path: Path) -> None:
    """A process that has ended has no such file; what it waited was read before."""
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("900 50 7\n")
    wait = CpuWait(schedstat)
    schedstat.write_text("1000 80 8\n")
    assert wait.read_ns() == 30
    schedstat.unlink()

    assert wait.read_ns() == 30
    assert CpuWait(schedstat).read_ns() is None


def test_the_limit_of_a_control_group_is_the_hosts(tmp_path: Path) -> None:
    """In a container the OOM killer counts from there; cache that can be dropped does not count."""
    reader = ProcessReader(cgroup(tmp_path, limit=str(64 * MIB), used=50 * MIB, inactive=20 * MIB))

    assert reader.host_memory() == (30 * MIB, 64 * MIB)


def test_the_smallest_limit_of_the_groups_around_a_process_applies(tmp_path: Path) -> None:
    """Slurm and systemd limit a group between the root and the process. The root has no limit."""
    job = tmp_path / "system.slice/slurmstepd.scope/job_1"
    (job / "step_0").mkdir(parents=True)
    cgroup(job, limit=str(64 * MIB), used=50 * MIB, inactive=20 * MIB)
    cgroup(job / "step_0", limit="max", used=10 * MIB)
    cgroup(job.parent, limit=str(96 * MIB), used=70 * MIB)
    reader = ProcessReader(tmp_path, proc=proc_of(tmp_path / "proc", f"{job.relative_to(tmp_path)}/step_0"))

    assert reader.host_memory() == (30 * MIB, 64 * MIB)


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_limit_the_machine_is(tmp_path: Path, limit: str) -> None:
    """A limit of 2**63 is none."""
    memory = ProcessReader(cgroup(tmp_path, limit=limit, used=50 * MIB)).host_memory()
    assert memory is not None
    used, total = memory

    assert total == psutil.virtual_memory().total
    assert 0 < used < total


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    """Workers end between two looks."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    assert ProcessReader(tmp_path).unshared_of(pid) == 0
    assert ProcessReader(tmp_path).unshared_of(os.getpid()) > MIB


def test_the_memory_of_workers_is_without_what_they_share(tmp_path: Path) -> None:
    """Forks that have read the dataset of the program hold it once together. Components of memory are disjoint."""
    data = bytearray(os.urandom(4096)) * (100 * MIB // 4096)
    ready, says = os.pipe()
    pids = []
    for _ in range(2):
        if (pid := os.fork()) == 0:
            sum(data[::4096])
            os.write(says, b"x")
            signal.pause()
        pids.append(pid)
    for _ in pids:
        os.read(ready, 1)
    reader = ProcessReader(tmp_path)
    try:
        assert sum(map(reader.unshared_of, pids)) < 100 * MIB
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ready)
        os.close(says)
    assert sum(map(reader.unshared_of, pids)) == 0


def test_a_process_that_has_ended_and_was_not_waited_for_writes_no_memory(tmp_path: Path) -> None:
    """A zombie has 0 B: the page of a killed run showed that as its memory at the end."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    builder = MetricBuilder()
    ProcessReader(tmp_path, pid=pid).write(builder)
    os.waitpid(pid, 0)

    assert c.PROCESS_MEMORY_USAGE.name not in {family.metric.name for family in builder.families()}


def memories(
    clock: FakeClock,
    *,
    datasets: Callable[[Iterable[str]], int | None] = lambda _: None,
    caches: Callable[[], Mapping[str, int]] = dict,
    devices: Callable[[], Mapping[str, int]] = dict,
) -> MemoryMonitor:
    return MemoryMonitor(datasets=datasets, caches=caches, devices=devices, clock=clock)


@given(
    levels=st.lists(st.integers(0, 1000), min_size=1, max_size=50),
    cuts=st.lists(st.integers(0, 49), max_size=5, unique=True).map(sorted),
)
def test_every_reading_is_in_the_peak_of_the_epoch_it_was_taken_in(
    levels: list[int], cuts: list[int]
) -> None:
    """Epochs are reported seconds after they ended: what was held since then belongs to the next one."""
    peak = Peak()
    for at_ns, level in enumerate(levels):
        peak.add(Reading(at_ns, level, level))

    begin = 0
    for cut in cuts:
        mine = levels[begin : cut + 1]
        if mine:
            assert peak.take(cut) == max(mine)
            begin = cut + 1


def test_an_epoch_without_a_reading_has_the_level_that_was_there() -> None:
    """Epochs of some milliseconds: between two looks memory counts as unchanged."""
    peak = Peak()
    assert peak.take(10) is None
    peak.add(Reading(20, 5, 9))
    assert [peak.take(10), peak.take(20), peak.take(30)] == [5, 9, 5]


def test_readings_of_a_long_epoch_take_no_more_memory_and_lose_no_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch of a week is three million readings."""
    monkeypatch.setattr(process, "MOST_READINGS", 8)
    for highest in range(100):
        peak = Peak()
        for at_ns in range(100):
            peak.add(Reading(at_ns, 1, 7 if at_ns == highest else 1))
        assert len(peak._readings) <= 8
        assert peak.take(99) == 7


def test_a_peak_between_two_looks_is_known_where_the_kernel_keeps_the_highest(tmp_path: Path) -> None:
    """A spike of a millisecond is what kills a process on a full node."""
    clock = FakeClock()
    status = tmp_path / "status"
    (tmp_path / "task").mkdir()  # no children: this process may have some of its own
    reader = ProcessTreeReader(clock, tmp_path)
    found = []
    for rss, highest in ((100, 500), (100, 500), (100, 900), (100, 900)):
        status.write_text(f"Name:\tpython\nVmHWM:\t  {highest} kB\nVmRSS:\t  {rss} kB\n", "utf-8")
        found.append(reader.read())

    assert [reading.level for reading in found] == [100 * 1024] * 4
    assert [reading.most for reading in found] == [100 * 1024, 100 * 1024, 900 * 1024, 100 * 1024]


def whole_level() -> int:
    """The memory of this process and its children, once each child has been measured: one is at a time."""
    clock = FakeClock()
    reader = ProcessTreeReader(clock)
    for _ in psutil.Process().children(recursive=True):
        reader.read()
        clock.tick(s=60)
    return reader.read().level


def test_what_a_process_started_is_part_of_its_memory() -> None:
    """Workers of a loader hold as much as the program, some of them more."""
    before = whole_level()
    code = "held = bytearray(b'x') * (100 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        held = psutil.Process(child.pid).memory_full_info().uss
        after = whole_level()
        child.communicate(b"\n")

    assert held > 100 * MIB
    assert after - before == pytest.approx(held, rel=0.1)
    assert whole_level() < before + 50 * MIB


def test_what_a_worker_shares_with_the_program_is_counted_once() -> None:
    """Four forks of a program of 10 GB are not 50 GB."""
    own = bytearray(100 * MIB)
    reader = ProcessTreeReader(system_clock)
    before = reader.read().level
    quit_reader, quit_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(quit_writer)
        os.read(quit_reader, 1)
        os._exit(0)
    os.close(quit_reader)
    try:
        after = ProcessTreeReader(system_clock).read().level
    finally:
        os.close(quit_writer)
        os.waitpid(pid, 0)

    assert len(own) == 100 * MIB
    assert psutil.Process().memory_info().rss > 100 * MIB
    assert after - before < 50 * MIB


class Descendant:
    """A descendant that is only read as often as ``ProcessTreeReader`` does."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.measured = 0

    def memory_full_info(self) -> Any:
        self.measured += 1
        return SimpleNamespace(rss=100 * MIB, uss=40 * MIB)

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=100 * MIB)


def tree_of(root: Path, children: Iterable[int]) -> Path:
    """A process folder with one thread that has started these processes."""
    (root / "task" / "1").mkdir(parents=True)
    (root / "task" / "1" / "children").write_text(" ".join(map(str, children)))
    (root / "status").write_text("VmHWM:\t 1024 kB\nVmRSS:\t 1024 kB\n")
    return root


def test_new_workers_are_measured_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that a loader starts for each epoch are measured within the processor time that a sample may take."""
    workers = {pid: Descendant(pid) for pid in range(2_000_000_001, 2_000_000_005)}
    clock = FakeClock()
    reader = ProcessTreeReader(clock, tree_of(tmp_path, workers))
    monkeypatch.setattr(psutil, "Process", workers.__getitem__)
    levels = []
    for measured in range(1, 5):
        levels.append(reader.read().level)
        assert sum(worker.measured for worker in workers.values()) == measured
        clock.tick(s=60)

    assert levels == [MIB + 40 * MIB * number for number in range(1, 5)]


def test_a_thread_that_ends_while_descendants_are_listed_hides_no_other(tmp_path: Path) -> None:
    """A program starts and ends threads all the time. The list of all processes of a node takes long."""
    listed = os.listdir
    tree_of(tmp_path, [7])

    def stale(path: Path) -> list[str]:
        return [*listed(path), "2"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", stale)
        assert process._descendants(tmp_path) == [7]


def test_a_kernel_without_lists_of_children_raises(tmp_path: Path) -> None:
    """There psutil lists them."""
    (tree_of(tmp_path, ()) / "task" / "1" / "children").unlink()

    with pytest.raises(FileNotFoundError):
        process._descendants(tmp_path)


def test_the_memory_of_a_process_that_has_ended_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """An agent samples until it has closed the run of a rank that was killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    clock = FakeClock()
    tree = ProcessTreeReader(clock, Path(f"/proc/{pid}"), pid=pid)
    monitor = MemoryMonitor(datasets=lambda _: None, caches=dict, devices=dict, clock=clock, tree=tree)
    monitor.sample()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for _ in range(3):
        clock.tick(s=2)
        monitor.sample()

    assert monitor.guard.faults == 0
    assert caplog.text == ""


def test_without_the_kernels_files_psutil_is_asked(tmp_path: Path) -> None:
    """Not every system has /proc."""
    level = ProcessTreeReader(system_clock, tmp_path / "none").read().level
    own = psutil.Process()
    children = sum(child.memory_info().rss for child in own.children(recursive=True))  # of other tests

    assert 0.8 * own.memory_info().rss <= level <= 1.2 * (own.memory_info().rss + children)


def test_values_are_in_mib_under_their_flat_names() -> None:
    """``*_mb`` is bytes by 2**20, whatever a disk maker says."""
    clock, driver = FakeClock(), FakeDriver(FakeClock())
    driver.used, driver.taken_bytes = [0, 1], 3 * MIB
    found = memories(
        clock, datasets=lambda names: 5 * MIB if list(names) == ["code"] else None,
        caches=lambda: {"a": MIB, "b": 2 * MIB}, devices=driver.taken,
    )  # fmt: skip
    assert found.sample() == pytest.approx(0.2)
    driver.taken_bytes = MIB
    clock.tick(s=1)
    found.sample()

    values = found.values(["code"], clock())

    own = psutil.Process().memory_info().rss / MIB
    assert 0.5 < values.pop("memory_peak_mb") / own < 20  # with the children of other tests
    assert values == {"memory_dataset_mb": 5, "memory_cache_mb": 3, "memory_peak_device_mb": 6}
    clock.tick(s=1)
    assert found.values(["code"], clock())["memory_peak_device_mb"] == 2


def test_what_is_not_there_has_no_value() -> None:
    """A program without a cache has no cache of zero."""
    clock = FakeClock()
    found = memories(clock)
    found.sample()

    assert set(found.values(["code"], clock())) == {"memory_peak_mb"}


def test_a_dataset_is_not_gone_through_for_every_short_epoch() -> None:
    """Epochs of a second would spend a percent of their time on it."""
    clock, asked = FakeClock(), []

    def size(names: Iterable[str]) -> int:
        asked.append(list(names))
        return MIB

    found = memories(clock, datasets=size)
    for _ in range(20):
        assert found.values(["a"], clock())["memory_dataset_mb"] == 1
        clock.tick(s=1)

    assert asked == [["a"], ["a"]]


def test_a_reading_that_fails_is_off_after_three(caplog: pytest.LogCaptureFixture) -> None:
    """A driver that is gone must not be asked five times a second for a week."""
    driver = FakeDriver(FakeClock())
    driver.fault = RuntimeError("the device is lost")
    found = memories(FakeClock(), devices=driver.taken)

    for _ in range(10):
        again_s = found.sample()

    assert again_s is None
    assert found.guard.faults == 3
    assert found.values(["code"], 0) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_caches_say_how_large_they_are() -> None:
    """A cache that grows is memory that the loader does not show."""
    held = [b"abc"]
    caches = CacheSizes()
    caches.add("images", lambda: sum(map(len, held)))
    caches.add("tokens", lambda: np.int64(7))
    held.append(b"de")

    assert caches.read() == {"images": 5, "tokens": 7}


def test_one_that_fails_is_said_once_and_off_after_three(caplog: pytest.LogCaptureFixture) -> None:
    """And takes no other with it."""
    calls = []

    def fails() -> int:
        calls.append(1)
        raise OSError("gone")

    caches = CacheSizes()
    caches.add("broken", fails)
    caches.add("whole", lambda: 1)
    with caplog.at_level(logging.WARNING, "otel_train"):
        read = [caches.read() for _ in range(5)]

    assert read == [{"whole": 1}] * 5
    assert (len(calls), caches.faults) == (3, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "size of cache 'broken'" in caplog.text


@pytest.mark.parametrize("said", [-1, 2.5, None, "7"])
def test_what_is_no_number_of_bytes_is_absent(said: object) -> None:
    """A ratio drawn as megabytes would mislead for weeks."""
    caches = CacheSizes()
    caches.add("odd", lambda: said)  # type: ignore[arg-type, return-value]  # on purpose

    assert (caches.read(), caches.faults) == ({}, 1)


def test_a_cache_can_be_taken_back_and_replaced() -> None:
    """The handle of the one before does not remove the one that took its name."""
    caches = CacheSizes()
    first = caches.add("images", lambda: 1)
    second = caches.add("images", lambda: 2)
    first.remove()
    assert caches.read() == {"images": 2}

    with second:
        pass
    second.remove()

    assert caches.read() == {}


def test_bad_input_is_refused_where_it_is_given() -> None:
    """The loop receives no notice."""
    with pytest.raises(otel_train.ConfigError, match="returns bytes"):
        CacheSizes().add("images", 5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(otel_train.ConfigError, match="called"):
        CacheSizes().add("", lambda: 1)
