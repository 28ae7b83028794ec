"""Hardware and memory: what is full, and what will be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana.dashboards.board import Board
from grafana.panels import ORANGE, RED, Panel, Row
from grafana.queries import (
    LINES,
    Query,
    devices_of_the_run,
    grown,
    highest,
    hosts_of_the_run,
    lowest,
    mean,
    most_grown,
    of,
    of_full_hosts,
    rate,
    run,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_RANK: Final = 'train_rank=~"$rank"'
_MEMORY: Final = "train_accelerator_memory"
_DEVICE: Final = "rank {{train_rank}} {{hw_name}}"
_RATIO: Final = "run_rank:train_accelerator_memory_reserved:ratio"
_RESERVED: Final = highest(f"{_MEMORY}_reserved_bytes", _RANK)
_LEAST_USED: Final = (
    f"bottomk({LINES}, min by (train_rank) ("
    f"{mean(f'{_MEMORY}_allocated_bytes', _RANK)} / ({mean(f'{_MEMORY}_reserved_bytes', _RANK)} > 0)))"
)
"""Ranks with the smallest part of the reserved bytes in use."""
_PEAKS: Final = highest(f"{_MEMORY}_reserved_peak_bytes", _RANK)
_CPU: Final = "process_cpu_time_seconds_total"
_RETRIES, _OOMS = f"{_MEMORY}_alloc_retries_total", f"{_MEMORY}_ooms_total"

DEVICE: Final = Row(
    "Device memory",
    (
        Panel(
            "Allocated, reserved, limit", "lines", "bytes",
            "Bytes in tensors, bytes reserved from the driver, and bytes that the device has.",
            "reserved reaches the limit and allocations are retried",
            [
                Query(of(run(f"{_MEMORY}_allocated_bytes", _RANK), _RESERVED), f"{_DEVICE} allocated"),
                Query(of(run(f"{_MEMORY}_reserved_bytes", _RANK), _RESERVED), f"{_DEVICE} reserved"),
                Query(of(run(f"{_MEMORY}_limit_bytes", _RANK), _RESERVED), f"{_DEVICE} limit", dashed=True),
            ],
            needs="device", runbook="TrainAcceleratorMemoryHigh",
        ),
        Panel(
            "Reserved over limit", "lines", "percentunit",
            "Bytes reserved from the driver, over the limit.",
            "it is over 95 % and allocations are retried",
            [Query(of(run(_RATIO, _RANK), highest(_RATIO, _RANK)), _DEVICE)],
            limits=((0.95, RED),), needs="device", runbook="TrainAcceleratorMemoryHigh", top=1,
        ),
        Panel(
            "Fragmentation", "lines", "percentunit",
            f"Share of the reserved bytes that no tensor uses: the {LINES} ranks with the most.",
            "it is high and the device runs out of memory nevertheless",
            [Query(of(f"(1 - {run(f'{_MEMORY}_allocated_bytes', _RANK)} / ({run(f'{_MEMORY}_reserved_bytes', _RANK)} > 0))", _LEAST_USED), _DEVICE)],
            needs="device", runbook="TrainAcceleratorOOM", top=1,
        ),
        Panel(
            "Retries and lack of memory", "bars", "short",
            "Allocations that had to empty the cache first, and those that failed.",
            "there is any",
            [
                Query(of(f"sum by (train_rank) ({grown(_RETRIES, _RANK)})", most_grown(_RETRIES, _RANK)), "rank {{train_rank}} retries"),
                Query(of(f"sum by (train_rank) ({grown(_OOMS, _RANK)})", most_grown(_OOMS, _RANK)), "rank {{train_rank}} out of memory"),
            ],
            needs="device", runbook="TrainAcceleratorOOM",
        ),
        Panel(
            "Peaks", "lines", "bytes",
            "Most bytes in tensors and most bytes taken from the driver at once, since the program last reset its peaks.",
            "they grow from epoch to epoch: something is kept",
            [
                Query(of(run(f"{_MEMORY}_allocated_peak_bytes", _RANK), _PEAKS), f"{_DEVICE} allocated"),
                Query(of(run(f"{_MEMORY}_reserved_peak_bytes", _RANK), _PEAKS), f"{_DEVICE} reserved"),
            ],
            needs="device", runbook="TrainAcceleratorOOM",
        ),
        Panel(
            "Transfers", "lines", "Bps",
            "Bytes per second between host and device.",
            "it is near what the bus can do",
            [Query(f"sum by (train_transfer_direction) ({rate('train_accelerator_io_bytes_total', _RANK)})", "{{train_transfer_direction}}")],
            needs="device",
        ),
    ),
)  # fmt: skip

HOST: Final = Row(
    "Host memory",
    (
        Panel(
            "Memory of the host", "lines", "bytes",
            "Memory in use and its limit, on the host or in its container.",
            "use comes near the limit: there the kernel kills",
            [
                Query(of_full_hosts(f"max by (host_name) ({run('train_host_memory_usage_bytes')})"), "{{host_name}} in use"),
                Query(of_full_hosts(f"max by (host_name) ({run('train_host_memory_limit_bytes')})"), "{{host_name}} limit", dashed=True),
            ],
            runbook="TrainHostMemoryLeak",
        ),
        Panel(
            "In four hours", "lines", "percentunit",
            "Host memory now, and a linear prediction for four hours from now, from the last hour.",
            "the prediction is over 100 %",
            [
                Query(of_full_hosts(run("host:train_host_memory:ratio")), "{{host_name}} now"),
                Query(of_full_hosts(f"predict_linear({run('host:train_host_memory:ratio')}[1h], 4 * 3600)"), "{{host_name}} in 4 h"),
            ],
            limits=((0.9, ORANGE), (1, RED)), runbook="TrainHostMemoryLeak", top=1.5,
        ),
        Panel(
            "Input pipeline", "area", "bytes",
            "Host memory of the workers and other parts of the input pipeline of a rank: of the rank with the most. Shared pages count in each.",
            "it grows all the time: workers copy the dataset, or a cache has no bound",
            [Query(f"max by (train_loader, train_memory_component) ({run('train_memory_usage_bytes')})", "{{train_loader}} {{train_memory_component}}")],
            runbook="TrainHostMemoryLeak",
        ),
        Panel(
            "Training process", "lines", "bytes",
            "Resident memory of each rank.",
            "it grows all the time",
            [Query(of(run("process_memory_usage_bytes", _RANK), highest("process_memory_usage_bytes", _RANK)), "rank {{train_rank}}")],
            runbook="TrainHostMemoryLeak",
        ),
        Panel(
            "Processors", "area", "short",
            "Processor seconds per second of the training process. Workers are processes of their own.",
            "system time is a large part, or the sum is as large as the number of cores",
            [Query(of(f"sum by (train_rank, cpu_mode) ({rate(_CPU, _RANK)})", most_grown(_CPU, _RANK)), "rank {{train_rank}} {{cpu_mode}}")],
        ),
        Panel(
            "Threads, file descriptors", "lines", "short",
            "Threads and open file descriptors of the training process.",
            "they grow all the time: a leak, often in a loader",
            [
                Query(of(run("process_thread_count", _RANK), highest("process_thread_count", _RANK)), "rank {{train_rank}} threads"),
                Query(of(run("process_unix_file_descriptor_count", _RANK), highest("process_unix_file_descriptor_count", _RANK)), "rank {{train_rank}} descriptors"),
            ],
        ),
    ),
)  # fmt: skip


def _nvml(
    title: str, unit: str, *queries: tuple[str, str], says: str, bad: str, drawn: Callable[..., str] = highest
) -> Panel:
    ranks = drawn(queries[0][0], _RANK)
    asked = [
        Query(of(run(name, _RANK), ranks), f"{_DEVICE}{part}", dashed=part == " limit")
        for name, part in queries
    ]
    return Panel(title, "lines", unit, says, bad, asked, 6, needs="device")


NVML: Final = Row(
    "Devices, by NVML, where no DCGM exporter answers",
    (
        _nvml("Kernels run", "percentunit", ("hw_gpu_utilization_ratio", ""), drawn=lowest, says="Time in which any kernel ran.", bad="it is low while steps are long"),
        _nvml(
            "Memory of the device", "bytes", ("hw_gpu_memory_usage_bytes", ""), ("hw_gpu_memory_limit_bytes", " limit"),
            says="In use by all processes on the device.", bad="it is far over what this run reserved: another process is on the device",
        ),
        _nvml("Power of the device", "watt", ("hw_power_watts", ""), drawn=lowest, says="Power that the device draws.", bad="one device draws far less than the others: it waits or is throttled"),
        _nvml("Temperature of the device", "celsius", ("hw_temperature_celsius", ""), says="Temperature of the device.", bad="it is near the limit where the clock is lowered"),
    ),
)  # fmt: skip


def _dcgm(title: str, unit: str, name: str, *, says: str, bad: str, drawn: str = "topk") -> Panel:
    query = Query(devices_of_the_run(name, drawn), "{{host_name}} {{gpu}}")
    return Panel(title, "lines", unit, says, bad, [query], needs="DCGM exporter")


OTHERS: Final = Row(
    "From the DCGM exporter and the node exporter, on the hosts of this run",
    (
        _dcgm("Device use", "percent", "DCGM_FI_DEV_GPU_UTIL", drawn="bottomk", says="Time in which any kernel ran.", bad="it is low while steps are long"),
        _dcgm("Temperature", "celsius", "DCGM_FI_DEV_GPU_TEMP", says="Temperature of the device.", bad="it is near the limit where the clock is lowered"),
        _dcgm("Power", "watt", "DCGM_FI_DEV_POWER_USAGE", drawn="bottomk", says="Power that the device draws.", bad="one device draws far less than the others: it waits or is throttled"),
        _dcgm("Faults", "short", "DCGM_FI_DEV_XID_ERRORS", says="Number of the last fault that the driver reported.", bad="it changes"),
        Panel(
            "Disk reads", "lines", "Bps",
            "Bytes per second that the hosts read from their disks.",
            "it is at what the disk can do while training waits for data",
            [Query(hosts_of_the_run("node_disk_read_bytes_total"), "{{host_name}}")],
            needs="node exporter", runbook="TrainInputBound",
        ),
        Panel(
            "Network", "lines", "Bps",
            "Bytes per second that the hosts receive.",
            "it is at the limit of the device",
            [Query(hosts_of_the_run("node_network_receive_bytes_total"), "{{host_name}}")],
            needs="node exporter",
        ),
    ),
)  # fmt: skip

HARDWARE: Final = Board(
    "otel-train-hardware",
    "Training: hardware and memory",
    f"What is full, and what will be. A graph by rank or host has the {LINES} that stand out most; pick ranks to see others.",
    (DEVICE, HOST, NVML, OTHERS),
)
