"""Memory, CPU time and descriptors of processes, from the operating system; peak memory of an epoch."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from otel_train import catalog as c
from otel_train.resource import GROUPS, memory_groups
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.aggregation.metrics import MetricBuilder
    from otel_train.datamodel import Clock

T = TypeVar("T")
R = TypeVar("R")

_MEASURE_EVERY_NS = 60 * 10**9
_MOST_WORKERS = 1024
"""Workers whose shared memory is remembered. Loaders may start new ones for each epoch."""

_PROC = Path("/proc/self")
_FILES = {
    2: ("memory.max", "memory.current", "memory.stat"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}
"""By version: files with limit, usage and statistics of a control group."""


class ProcessReader:
    """Reads values of a process from psutil, and of its control groups; of this process if ``pid`` is None.

    ``cgroup``: folder in which control groups are mounted. ``proc``: folder of the processes.
    """

    def __init__(self, cgroup: Path = GROUPS, *, pid: int | None = None, proc: Path = _PROC.parent) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process: Any = None
        self._workers: dict[int, ChildProcess] = {}
        with suppress(psutil.NoSuchProcess):  # another process may have ended by now
            self._process = psutil.Process(pid)
        machine = self._machine()
        total = machine.total if machine is not None else 0
        groups = memory_groups(pid, cgroup, proc)
        found = [
            [folder / name for name in _FILES[group.version]] for group in groups for folder in group.folders
        ]
        # A job scheduler sets the limit of a group around the process (Slurm, systemd); the smallest one applies.
        limited = [(limit, files) for files in found if (limit := _number(files[0])) and limit < total]
        self._limit: int
        self._files: list[Path]
        self._limit, self._files = min(limited, default=(total, []))

    def write(self, builder: MetricBuilder) -> None:
        """Writes the current values; only those of the machine if the process has ended."""
        if self._process is not None:
            with suppress(self._psutil.Error), self._process.oneshot():
                self._write_process(builder)
        memory = self.host_memory()
        if memory is not None:
            builder.put(c.HOST_MEMORY_USAGE, memory[0])
            builder.put(c.HOST_MEMORY_LIMIT, memory[1])

    def _write_process(self, builder: MetricBuilder) -> None:
        if resident := self._process.memory_info().rss:  # a zombie has none
            builder.put(c.PROCESS_MEMORY_USAGE, resident)
        times = self._process.cpu_times()
        builder.put(c.PROCESS_CPU_TIME, times.user, "user")
        builder.put(c.PROCESS_CPU_TIME, times.system, "system")
        builder.put(c.PROCESS_THREAD_COUNT, self._process.num_threads())
        builder.put(c.PROCESS_UNIX_FILE_DESCRIPTOR_COUNT, self._process.num_fds())

    def unshared_of(self, pid: int) -> int:
        """Returns the resident bytes that another process does not share; 0 if it has ended.

        Workers are forks of the program: each maps its pages. What is shared is measured every minute, because that takes long.
        """
        now_ns = time.monotonic_ns()
        try:
            worker = self._workers.get(pid) or ChildProcess(self._psutil.Process(pid))
            if worker.sampled_ns < 0 or now_ns - worker.sampled_ns >= _MEASURE_EVERY_NS:
                worker.sample(now_ns)
            held = worker.held()
        except self._psutil.Error:
            self._workers.pop(pid, None)
            return 0
        if len(self._workers) >= _MOST_WORKERS:
            self._workers.clear()
        self._workers[pid] = worker
        return held

    def _machine(self) -> Any:  # Any: what psutil gives; None where there is no /proc
        with suppress(OSError):
            return self._psutil.virtual_memory()
        return None

    def host_memory(self) -> tuple[int, int] | None:
        """Returns (used, limit) in bytes: of the control group if it has a limit, else of the machine."""
        machine = self._machine()
        if machine is None:
            return None
        if not self._files:
            return machine.total - machine.available, machine.total
        _, usage, stat = self._files
        used = (_number(usage) or 0) - _inactive_bytes(stat)
        return max(0, used), min(self._limit, machine.total)


def _inactive_bytes(stat: Path) -> int:
    """Returns the bytes of page cache that the kernel would reclaim first; the processes do not need them."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line]
    except OSError:
        return 0
    found = [words[1] for words in lines if words[0] in {"inactive_file", "total_inactive_file"}]
    return int(found[-1]) if found else 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class CpuWait:
    """Reads how long the main thread of a process has been runnable without a processor, since the first reading.

    The second number of ``schedstat`` is the time on a run queue (https://docs.kernel.org/scheduler/sched-stats.html). It
    includes throttling by the CPU limit of the control group.
    """

    def __init__(self, schedstat: Path) -> None:
        self._schedstat = schedstat
        self._begun_ns = self._waited_ns()
        self._last_ns = 0

    def read_ns(self) -> int | None:
        """Returns nanoseconds; after the process has ended, the last value. None if the kernel does not provide it."""
        if self._begun_ns is None:
            return None
        if (waited_ns := self._waited_ns()) is not None:
            self._last_ns = max(self._last_ns, waited_ns - self._begun_ns)
        return self._last_ns

    def _waited_ns(self) -> int | None:
        try:
            return int(self._schedstat.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None


# --- peak memory between two instants ---------------------------------------------------------------

MOST_READINGS = 4096
"""Readings kept for one epoch: 14 minutes of them. In a longer epoch pairs of readings are merged."""

_LIST_EVERY_NS = 10**9
_PAUSE_FACTOR = 200
"""Pause between two samples of shared memory, in multiples of the processor time of the last one: half a percent of a core."""

_KIB = 1024


class Reading(NamedTuple):
    """One sample: bytes held now, and the most known to have been held since the last sample."""

    at_ns: int
    level: int
    most: int


class Peak:
    """Largest of the readings since the last call of ``take``."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self._level: int | None = None  # the last reading before them

    def add(self, reading: Reading) -> None:
        """Adds a reading, later than all others."""
        self._readings.append(reading)
        if len(self._readings) > MOST_READINGS:
            pairs = zip(*[iter(self._readings)] * 2, strict=False)
            halved = [b._replace(most=max(a.most, b.most)) for a, b in pairs]
            last = [self._readings[-1]] if len(self._readings) % 2 else []
            self._readings = deque([*halved, *last])

    def take(self, until_ns: int) -> int | None:
        """Returns the maximum up to ``until_ns``; later samples count for the next call. None without a sample."""
        most = []
        while self._readings and self._readings[0].at_ns <= until_ns:
            reading = self._readings.popleft()
            self._level = reading.level
            most.append(reading.most)
        if most:
            return max(most)
        return self._level if self._level is not None or not self._readings else self._readings[0].level


class ChildProcess:
    """A child process.

    Attributes:
        sampled_ns: time of the last call of ``sample``; -1 before.
    """

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self.sampled_ns = -1
        self._process = process
        self._shared = 0

    def sample(self, now_ns: int) -> None:
        """Measures the memory shared with other processes. The kernel walks the page tables: milliseconds per gigabyte."""
        self.sampled_ns = now_ns
        known = self._process.memory_full_info()
        self._shared = known.rss - known.uss

    def held(self) -> int:
        """Returns the resident bytes that it does not share; 0 before the first sample, so that no peak has shared ones."""
        if self.sampled_ns < 0:
            return 0
        return max(0, int(self._process.memory_info().rss) - self._shared)


class ProcessTreeReader:
    """Samples memory of a process and its descendants: resident bytes of the process, and unshared ones of the descendants.

    Workers are forks of the program, so ``ps`` counts the program's own pages again in each of them. ``proc`` is the folder of
    process ``pid`` (None: this one) in /proc; where there is no /proc, psutil is used.
    """

    def __init__(self, clock: Clock, proc: Path = _PROC, *, pid: int | None = None) -> None:
        import psutil

        self._psutil: Any = psutil
        self._clock = clock
        self._proc = proc
        self._own: Any = None
        with suppress(psutil.NoSuchProcess):  # another process may have ended by now
            self._own = psutil.Process(pid)
        self._children: dict[int, ChildProcess] = {}
        self._sample_ns = 0
        self._listed_ns = -_LIST_EVERY_NS
        self._highest: int | None = None

    def read(self) -> Reading:
        """Takes a sample. A new all-time peak of the process itself is exact."""
        now_ns = self._clock()
        if now_ns - self._listed_ns >= _LIST_EVERY_NS:
            self._listed_ns = now_ns
            self._children = self._list()
        if self._children and now_ns >= self._sample_ns:
            begun_ns = time.thread_time_ns()
            # A page that a forked worker writes to is shared no longer, so the measurement is repeated, the oldest first, new
            # processes before all.
            oldest = min(self._children.values(), key=attrgetter("sampled_ns"))
            self._query(oldest, lambda child: child.sample(now_ns))
            self._sample_ns = now_ns + _PAUSE_FACTOR * (time.thread_time_ns() - begun_ns)
        own, highest = self._status()
        others = sum(self._query(child, ChildProcess.held) or 0 for child in self._children.values())
        risen = self._highest is not None and highest > self._highest
        self._highest = max(highest, self._highest or 0)
        return Reading(now_ns, own + others, (highest if risen else own) + others)

    def _status(self) -> tuple[int, int]:
        """Returns the resident bytes of the process: current and all-time peak."""
        try:
            text = (self._proc / "status").read_bytes()
        except OSError:
            text = b""
        own, highest = (_field(text, name) for name in (b"VmRSS:", b"VmHWM:"))
        own = own if own is not None else self._psutil_rss()
        return own, highest if highest is not None else own

    def _psutil_rss(self) -> int:
        return self._query(self._own, lambda own: int(own.memory_info().rss)) or 0 if self._own else 0

    def _list(self) -> dict[int, ChildProcess]:
        try:
            pids = _descendants(self._proc.resolve())
        except OSError:
            found_by = self._query(self._own, lambda own: own.children(recursive=True)) if self._own else None
            pids = [child.pid for child in found_by or ()]
        found = {pid: child for pid, child in self._children.items() if pid in pids}
        for pid in set(pids).difference(found):
            child = self._query(pid, lambda pid: ChildProcess(self._psutil.Process(pid)))
            if child is not None:
                found[pid] = child
        return found

    def _query(self, of: T, ask: Callable[[T], R]) -> R | None:
        """Returns a value of a process; None if it has ended, or belongs to another user."""
        try:
            return ask(of)
        except self._psutil.Error:
            return None


def _descendants(proc: Path) -> list[int]:
    """Returns the ids of all descendants of the process at ``proc``. Reads no other processes: a node may have thousands."""
    found: list[int] = []
    for thread in os.listdir(proc / "task"):  # noqa: PTH208 - a Path for each costs more than the look
        folder = proc / "task" / thread
        try:
            found += map(int, (folder / "children").read_text().split())
        except OSError:
            if folder.exists():  # a kernel without these files; else the thread has ended
                raise
    for pid in list(found):
        with suppress(OSError):  # it has ended
            found += _descendants(proc.parent / str(pid))
    return found


def _field(text: bytes, name: bytes) -> int | None:
    _, there, rest = text.partition(name)
    return int(rest.split(None, 1)[0]) * _KIB if there else None


MEMORY_KEYS = ("memory_dataset_mb", "memory_cache_mb", "memory_peak_mb", "memory_peak_device_mb")
"""Flat names of the memory of an epoch, in the order in which ``MemoryMonitor`` determines it."""

LOOK_EVERY_S = 0.2
"""Seconds between two samples: a buffer held for half a second is seen twice. A sample takes 0.1 ms, mostly in the kernel."""

_ESTIMATE_EVERY_NS = 10 * 10**9
_MIB = 2**20


class MemoryMonitor:
    """Samples memory and computes the peak per epoch.

    Args:
        datasets: returns the estimated bytes of the datasets of these loaders; None if there are none.
        caches: returns the bytes of the known caches, by name.
        devices: returns the bytes in use on each device, as reported by its driver.
        tree: reads the memory of the process and its descendants; None for this process.
    """

    def __init__(
        self,
        *,
        datasets: Callable[[Iterable[str]], int | None],
        caches: Callable[[], Mapping[str, int]],
        devices: Callable[[], Mapping[str, int]],
        clock: Clock,
        tree: ProcessTreeReader | None = None,
    ) -> None:
        self.guard = Guard("memory")
        self._datasets = datasets
        self._caches = caches
        self._devices = devices
        self._clock = clock
        self._tree = tree or ProcessTreeReader(clock)
        self._peak, self._device_peak = Peak(), Peak()
        self._estimates: dict[tuple[str, ...], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def sample(self) -> float | None:
        """Takes a sample; returns the seconds until the next one, None to stop."""
        if self.guard.closed:
            return None
        with self.guard, self._lock:
            self._peak.add(self._tree.read())
            taken = self._devices()
            if taken:
                held = sum(taken.values())
                self._device_peak.add(Reading(self._clock(), held, held))
        return LOOK_EVERY_S

    def values(self, loaders: Iterable[str], until_ns: int) -> dict[str, float]:
        """Returns the memory of the epoch that ended at ``until_ns``, by flat name, in MiB. The next epoch begins there."""
        if self.guard.closed:
            return {}
        with self.guard:
            with self._lock:
                peak, device_peak = self._peak.take(until_ns), self._device_peak.take(until_ns)
            caches = self._caches()
            dataset, cache = self._estimate(tuple(loaders)), sum(caches.values()) if caches else None
            sizes = zip(MEMORY_KEYS, (dataset, cache, peak, device_peak), strict=True)
            return {key: size / _MIB for key, size in sizes if size is not None}
        return {}

    def _estimate(self, loaders: tuple[str, ...]) -> int | None:
        """Returns the bytes of the loaders' datasets; None without one. Cached, because epochs may be short."""
        now_ns = self._clock()
        at_ns, known = self._estimates.get(loaders, (0, None))
        if known is not None and now_ns - at_ns < _ESTIMATE_EVERY_NS:
            return known
        size = self._datasets(loaders)
        self._estimates = {} if size is None else {loaders: (now_ns, size)}
        return size
