"""Batches on their way to a device are seen, and inspecting Tensor does not show the patch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.instrumentation.device_copy import TransferProbe, _sizes, _TargetDevice
from otel_train.instrumentation.stages import StageRecorder
from otel_train.recording.events import OP_MASK, PAYLOAD_SHIFT, SOURCE_MASK, SOURCE_SHIFT, Op, SourceKind
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.device import FakeDriver
from tests.support.flight import PrivateMemory
from tests.support.waiting import in_threads

torch = pytest.importorskip("torch")

AWAY = "meta"
"""The fake driver's kind of device: torch moves tensors there on any machine, without their values."""

METHODS = ("to", "cuda", "pin_memory", "cpu")


class Bench:
    """A probe whose driver takes meta tensors for those on an accelerator."""

    def __init__(self, *used: int, find_torch: Any = lambda: torch) -> None:
        self.clock = FakeClock()
        self.driver = FakeDriver(self.clock)
        self.driver.used = list(used)
        self.recorder = Recorder(PrivateMemory(1 << 12), clock=lambda: self.clock.tick(1))
        self.probe = TransferProbe(self.recorder, self.driver, find_torch=find_torch)
        self.probe.poll()

    def written(self) -> list[tuple[str, str, int]]:
        """Op, source and payload of every edge of the main thread."""
        codes = self.recorder.main.ring.read(1 << 12).codes.tolist()
        return [
            (
                Op(c & OP_MASK).name,
                self.recorder.sources[c >> SOURCE_SHIFT & SOURCE_MASK].name,
                c >> PAYLOAD_SHIFT,
            )
            for c in codes
        ]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A device in use."""
    made = Bench(0)
    yield made
    made.probe.remove()


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to(AWAY),
        lambda x: x.to(f"{AWAY}:0"),
        lambda x: x.to(torch.device(AWAY)),
        lambda x: x.to(device=AWAY),
        lambda x: x.to(AWAY, torch.float32, non_blocking=True),
        lambda x: x.to(torch.empty(1, device=AWAY)),
        lambda x: x.to(tensor=torch.empty(1, device=AWAY)),
    ],
)
def test_every_way_to_say_to_is_a_transfer_of_its_bytes(bench: Bench, move: Any) -> None:
    """Loops spell it as they like."""
    moved = move(torch.ones(8))

    assert moved.device.type == AWAY
    assert bench.written() == [("BEGIN", "meta:0", 0), ("END", "meta:0", 33)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.to(dtype=torch.float64),
        lambda x: x.to("cpu"),
        lambda x: x.to(x),
        lambda x: x.cpu(),
        lambda x: x.to(AWAY).to(torch.float64),
    ],
)
def test_what_moves_nothing_to_a_device_is_no_transfer(bench: Bench, call: Any) -> None:
    """A cast is work of the stage it stands in."""
    call(torch.ones(8))

    assert [edge for edge in bench.written() if edge[1] != "meta:0"] == []
    assert len(bench.written()) <= 2


def test_a_model_on_its_way_to_a_device_is_no_batch(bench: Bench) -> None:
    """Parameters, buffers and gradients of a teacher that is moved in mid-run are no input."""
    model = torch.nn.BatchNorm1d(4)
    model(torch.ones(2, 4)).sum().backward()

    model.to(AWAY)
    torch.nn.Linear(2, 2).weight.to(AWAY)
    torch.nn.Sequential(torch.nn.BatchNorm1d(4)).to(device=AWAY, dtype=torch.float64)

    assert bench.written() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda() works here")
def test_a_transfer_that_fails_fails_as_before(bench: Bench) -> None:
    """The error is torch's own, and its time is known."""
    x = torch.ones(2)
    bench.probe.remove()
    with pytest.raises((RuntimeError, AssertionError)) as bare:
        x.cuda()
    again = Bench(0)
    try:
        with pytest.raises(bare.type, match=r"CUDA|cuda|NVIDIA|driver"):
            x.cuda()
        with pytest.raises(RuntimeError, match="nowhere"):
            x.to("nowhere")
        with pytest.raises(TypeError):
            x.to([])
    finally:
        again.probe.remove()

    assert again.written() == [("BEGIN", "meta:0", 0), ("FAIL", "meta:0", 0)]


def test_whoever_asks_the_class_gets_the_original(bench: Bench) -> None:
    """Tables of ``__torch_function__``, of the compiler and of others are keyed by it."""
    bench.probe.remove()
    originals = {name: getattr(torch.Tensor, name) for name in METHODS}
    again = Bench(0)

    seen = {name: getattr(torch.Tensor, name) for name in METHODS}
    again.probe.remove()

    assert all(seen[name] is originals[name] for name in METHODS)
    assert not any(name in vars(torch.Tensor) for name in METHODS)


class Noting(torch.Tensor):  # type: ignore[name-defined]  # torch is imported by name
    """Records what is called on it, as the tensors of an image library do."""

    calls: list[Any] = []  # noqa: RUF012  # one list for all of them is the point

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_is_seen_and_sees_the_call_it_always_saw(bench: Bench) -> None:
    """Reading its device would be one more call in its log."""
    image = torch.ones(8).as_subclass(Noting)
    Noting.calls.clear()

    moved = image.to(AWAY)

    assert Noting.calls == [torch.Tensor.to]
    assert type(moved) is Noting
    assert bench.written() == [("BEGIN", "meta:0", 0), ("END", "meta:0", 33)]


def test_tensors_that_only_stand_for_others_are_left_alone(bench: Bench) -> None:
    """A compiler traces with fake tensors: they move nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.ones(8).to(AWAY)

    assert bench.written() == []


def test_instrumentation_adds_no_graph_break_to_compiled_code(bench: Bench) -> None:
    """A transfer inside a compiled function stays in the stage that calls it."""
    del bench
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of whatever was compiled in this process before

    @torch.compile(backend="eager", fullgraph=True)
    def double(x: Any) -> Any:
        return x.to(torch.float64) * 2

    @torch.compile(backend="eager", fullgraph=True)
    def away(x: Any) -> Any:
        return x.to(AWAY)

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert away(torch.ones(2)).device.type == AWAY
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_code_that_was_compiled_before_is_not_compiled_again() -> None:
    """The first device may come into use, and the session may close, in the middle of a run."""
    torch._dynamo.reset()
    compiled = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    double = torch.compile(lambda x: x.to(torch.float64).cpu() * 2, backend=count, fullgraph=True)
    double(torch.ones(2))
    bench = Bench(0)
    double(torch.ones(2))
    bench.probe.remove()
    double(torch.ones(2))

    assert compiled == 1
    torch._dynamo.reset()


def test_a_close_in_the_middle_of_a_look_leaves_nothing_behind() -> None:
    """The agent polls, another thread closes."""
    bench = Bench()
    bench.driver.used = [0]

    def devices() -> list[int]:
        bench.probe.remove()
        return [0]

    bench.driver.devices = devices  # type: ignore[method-assign]
    bench.probe.poll()

    assert not any(name in vars(torch.Tensor) for name in METHODS)


def test_tensors_are_copied_and_pickled_as_before(bench: Bench) -> None:
    """A bound method, too: it is sent to worker processes."""
    x = torch.ones(8)

    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    assert torch.equal(copy.deepcopy(x), x)
    assert pickle.loads(pickle.dumps(x.to))("cpu").tolist() == x.tolist()
    assert bench.written() == []


def test_a_thread_that_trains_nothing_writes_nothing(bench: Bench) -> None:
    """DataLoader pins in a thread of its own: that is not the training thread's time."""
    in_threads(lambda: torch.ones(8).to(AWAY))

    assert bench.written() == []
    assert len(bench.recorder.threads) == 1


def test_a_second_training_thread_is_seen(bench: Bench) -> None:
    """One that has written edges before."""

    def train() -> None:
        bench.recorder.edge(0)
        torch.ones(8).to(AWAY)

    in_threads(train)

    assert bench.recorder.threads[1].ring.written == 3


def test_without_a_device_in_use_nothing_is_touched() -> None:
    """A run on the processor pays nothing."""
    bench = Bench()

    assert not any(name in vars(torch.Tensor) for name in METHODS)
    bench.driver.used = [0]
    bench.probe.poll()
    assert all(name in vars(torch.Tensor) for name in METHODS)
    bench.probe.remove()
    bench.probe.poll()
    assert not any(name in vars(torch.Tensor) for name in METHODS)


def test_a_patch_put_over_ours_stays() -> None:
    """And ours under it passes through."""
    bench = Bench(0)
    ours = vars(torch.Tensor)["to"]

    def theirs(x: Any, *args: Any) -> Any:
        return ours.__get__(x)(*args)

    torch.Tensor.to = theirs
    try:
        bench.probe.remove()

        assert torch.Tensor.to is theirs
        assert torch.ones(2).to(AWAY).device.type == AWAY
        assert bench.written() == []
    finally:
        del torch.Tensor.to


def test_what_was_there_before_is_there_after() -> None:
    """Another library may have patched the method first."""
    original = torch.Tensor.to

    def theirs(x: Any, *args: Any) -> Any:
        return original(x, *args)

    torch.Tensor.to = theirs
    try:
        bench = Bench(0)
        assert torch.ones(2).to(AWAY).device.type == AWAY
        assert torch.Tensor.to is theirs
        bench.probe.remove()

        assert vars(torch.Tensor)["to"] is theirs
        assert [op for op, _, _ in bench.written()] == ["BEGIN", "END"]
    finally:
        del torch.Tensor.to


class Returning:
    """A tensor on a device that can come back from it, which those on ``meta`` cannot."""

    is_cpu, nbytes = False, 32
    __torch_dispatch__ = None

    def to(self) -> Returning:
        return self

    cuda = pin_memory = cpu = to

    def get_device(self) -> int:
        return 1


STAND_IN = SimpleNamespace(
    Tensor=Returning,
    DisableTorchFunctionSubclass=nullcontext,
    nn=SimpleNamespace(Parameter=int, Module=torch.nn.Module),
)


def test_a_user_stage_of_that_name_is_the_same_stage() -> None:
    """``stage("h2d")`` around a library's batch object: what is moved inside it is not counted again."""
    bench = Bench()
    hand = StageRecorder(bench.recorder)

    for name in ("h2d", "augment"):
        hand.register(name)

    assert [(source.kind, source.stage) for source in bench.recorder.sources[-2:]] == [
        (SourceKind.H2D, "h2d"), (SourceKind.STAGE, "augment"),
    ]  # fmt: skip


def test_what_comes_back_is_counted_by_device() -> None:
    """By ``cpu()``: no stage, but bytes on the same wire."""
    bench = Bench(0, 1, find_torch=lambda: STAND_IN)
    tensor = Returning()

    for _ in range(3):
        tensor.cpu()

    assert bench.probe.copied_to_host() == {"meta:1": 96}
    bench.probe.remove()
    tensor.cpu()
    assert bench.probe.copied_to_host() == {"meta:1": 96}


def test_all_copies_are_counted_however_many_come_before_a_report(bench: Bench) -> None:
    """A report may be late, and two threads may copy at once."""
    back = bench.probe._counted(lambda x: x, size=lambda _: 1, device_of=lambda _: 0)

    def copy() -> None:
        for _ in range(50_000):
            back(None)

    in_threads(copy, copy)
    assert list(bench.probe.copied_to_host().values()) == [100_000]


def test_a_fault_in_a_replaced_method_does_not_reach_the_program(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original is called."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(_TargetDevice, "_learn", fail)
    assert torch.ones(1).to("meta").device.type == "meta"
    assert bench.written() == []


def test_bytes_of_sparse_tensors_are_those_of_their_parts() -> None:
    """A sparse tensor has no ``nbytes``; of a tensor whose bytes are unknown nothing is counted."""
    size = _sizes(torch.DisableTorchFunctionSubclass)
    eye = torch.eye(3)  # three values of 4 bytes; two indices of 8 bytes of each
    bench = Bench(0)
    back = bench.probe._counted(lambda x: x, size=size, device_of=lambda _: 0)

    assert [size(each) for each in (eye, eye.to_sparse(), object())] == [36, 60, -1]
    for each in (eye, object(), object(), eye.to_sparse()):
        back(each)
    assert list(bench.probe.copied_to_host().values()) == [96]
