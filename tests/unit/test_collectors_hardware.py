"""What NVML says is published unless another exporter publishes it, and its absence is silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder
from otel_train.collectors.hardware import HardwareReader, dcgm_answers
from otel_train.datamodel import Point
from tests.support.http_server import http_server


class NvmlError(Exception):
    pass


class Nvml:
    """Two devices, of which the second tells neither power nor utilisation."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.known = ["GPU-0", "GPU-1"]
        self.calls: list[str] = []

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's own names
        self.calls.append("init")
        if self.broken:
            raise NvmlError

    def nvmlShutdown(self) -> None:  # noqa: N802  # as above
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802  # as above
        self.calls.append(uuid)
        if uuid not in self.known:
            raise NvmlError
        return self.known.index(uuid)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802  # as above
        raise NvmlError

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802  # as above
        return SimpleNamespace(gpu=self._of_the_first(handle, 73))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802  # as above
        return self._of_the_first(handle, 312_500)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802  # as above
        return SimpleNamespace(used=10 + handle, total=80)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802  # as above
        return 50 + handle + sensor

    @staticmethod
    def _of_the_first(handle: int, value: int) -> int:
        if handle:
            raise NvmlError
        return value


class SlicedNvml(Nvml):
    """A device cut into parts. NVML tells the use of the whole, and of each part its memory; the rest it refuses."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.known = ["GPU-0", *(f"MIG-part{n}" for n in range(parts))]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802  # NVML's own names
        if handle:
            raise NvmlError
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802  # as above
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:  # noqa: N802  # as above
        if index + 1 >= len(self.known):
            raise NvmlError
        return index + 1


def reader(nvml: Any, *, mode: str = "auto", answers: bool = False, used: int = 2) -> HardwareReader:
    devices = {f"cuda:{n}": f"GPU-{n}" for n in range(used)}
    return HardwareReader(lambda: devices, mode=mode, exporter_answers=lambda: answers, load=lambda: nvml)


def shown(hardware: HardwareReader) -> dict[tuple[str, str], float]:
    builder = MetricBuilder(lambda _: True)
    hardware.write(builder)
    return {
        (family.metric.name, str(dict(point.attributes)[c.DEVICE.name])): point.value
        for family in builder.families()
        for point in family.points
        if isinstance(point, Point)
    }


def test_every_device_in_use_has_what_it_tells() -> None:
    """A laptop has no power meter, a slice of a device no utilisation: absent, not zero."""
    assert shown(reader(Nvml())) == {
        ("hw.gpu.utilization.ratio", "cuda:0"): 0.73,
        ("hw.gpu.memory.usage", "cuda:0"): 10,
        ("hw.gpu.memory.limit", "cuda:0"): 80,
        ("hw.power", "cuda:0"): 312.5,
        ("hw.temperature", "cuda:0"): 50,
        ("hw.gpu.memory.usage", "cuda:1"): 11,
        ("hw.gpu.memory.limit", "cuda:1"): 80,
        ("hw.temperature", "cuda:1"): 51,
    }


@pytest.mark.parametrize("instance", ["MIG-part1", "GPU-part1"])
def test_a_part_of_a_device_is_read_under_its_own_name(instance: str) -> None:
    """CUDA has its UUID with the first word of a whole one. Its utilisation and temperature are unknown: absent, not 0."""
    nvml = SlicedNvml(2)
    hardware = HardwareReader(
        lambda: {"cuda:0": instance}, mode="on", exporter_answers=bool, load=lambda: nvml
    )  # fmt: skip

    assert shown(hardware) == {
        ("hw.gpu.memory.usage", "cuda:0"): 12,
        ("hw.gpu.memory.limit", "cuda:0"): 80,
    }
    assert hardware.guard.faults == 0


def test_of_a_device_in_parts_the_only_one_that_we_see_is_ours() -> None:
    """A container is given one part, and CUDA may tell the UUID of the device around it."""
    assert shown(reader(SlicedNvml(1), used=1)) == {
        ("hw.gpu.memory.usage", "cuda:0"): 11,
        ("hw.gpu.memory.limit", "cuda:0"): 80,
    }


def test_where_it_is_unknown_which_part_is_ours_none_is_read() -> None:
    """The memory of the whole device, or of another's part, would be a wrong metric."""
    hardware = reader(SlicedNvml(3), used=1)

    assert shown(hardware) == {}
    assert hardware.guard.faults == 0


def test_nvml_is_started_once_and_given_back() -> None:
    """Other libraries count on its reference count."""
    nvml = Nvml()
    hardware = reader(nvml)

    shown(hardware)
    shown(hardware)
    hardware.close()

    assert nvml.calls == ["init", "GPU-0", "GPU-1", "shutdown"]
    assert shown(hardware) == {}


@pytest.mark.parametrize(
    ("mode", "answers", "there"), [("auto", True, False), ("on", True, True), ("off", False, False)]
)
def test_where_an_exporter_answers_we_are_silent(mode: str, *, answers: bool, there: bool) -> None:
    """The same metric from two sources is a sum that means nothing."""
    nvml = Nvml()

    assert bool(shown(reader(nvml, mode=mode, answers=answers))) == there
    assert bool(nvml.calls) == there


def test_without_the_package_there_is_no_row_and_no_fault() -> None:
    """It is an extra. It is looked for once."""
    asked = []

    def load() -> Any:
        asked.append(1)
        raise ModuleNotFoundError("pynvml")

    hardware = HardwareReader(lambda: {"cuda:0": "GPU-0"}, mode="on", exporter_answers=bool, load=load)

    assert shown(hardware) == shown(hardware) == {}
    assert asked == [1]
    assert hardware.guard.faults == 0


def test_an_nvml_that_does_not_start_is_no_fault() -> None:
    """A container without the driver's library has the package all the same."""
    nvml = Nvml(broken=True)
    hardware = reader(nvml)

    assert shown(hardware) == shown(hardware) == {}
    hardware.close()
    assert nvml.calls == ["init"]
    assert hardware.guard.faults == 0


def test_without_a_device_in_use_nvml_is_not_loaded() -> None:
    """A run on the processor imports nothing and knocks nowhere."""
    nvml = Nvml()

    assert shown(reader(nvml, used=0)) == {}
    assert nvml.calls == []


@contextmanager
def page(text: bytes) -> Iterator[str]:
    """An exporter with that page."""
    with http_server(lambda *_: (200, text)) as url:
        yield url.removeprefix("http://")


def test_an_exporter_is_known_by_its_page() -> None:
    """Something else may listen on that port."""
    with page(b'# HELP x\nDCGM_FI_DEV_GPU_UTIL{gpu="0"} 7\n') as endpoint:
        assert dcgm_answers(endpoint, timeout_s=10)
    with page(b"node_cpu_seconds_total 1\n") as endpoint:
        assert not dcgm_answers(endpoint, timeout_s=10)
    assert not dcgm_answers(endpoint, timeout_s=10)
    assert not dcgm_answers("not an endpoint:x", timeout_s=10)


def test_one_that_never_answers_is_not_waited_for() -> None:
    """The agent has other things to do."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun_s = time.monotonic()
        answers = dcgm_answers(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)

    assert not answers
    assert time.monotonic() - begun_s < 5
