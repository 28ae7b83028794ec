"""What the user sees of a failure is what it would be without us; and the summary says how the run ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import otel_train
from tests.integration.loops.truth import QUIET, Net, loader, loss_of, sgd
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]

# --- tracebacks ----------------------------------------------------------------------------------


class Fault(Exception):  # noqa: N818 - not an error of the program
    """What is raised on purpose, with a cause, a context and a note where Python has them."""


def fail() -> None:
    try:
        dict[str, int]()["deep"]
    except KeyError as cause:
        fault = Fault("the user's own words", 42)
        if hasattr(fault, "add_note"):
            fault.add_note("a note")
        raise fault from cause


class Failing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fail()
        return super().forward(x)


class Unreadable(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        fail()
        return torch.zeros(4)


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        fail()


def fails(_number: int) -> None:
    fail()


def in_forward(watch: Callable[..., Any]) -> None:
    model, train = Failing(), loader(2)
    watch(model, {"train": train})
    for batch in train:
        loss_of(model, batch).backward()


def in_a_wrong_shape(watch: Callable[..., Any]) -> None:
    model, train = Net(), loader(2)
    watch(model, {"train": train})
    for x, _ in train:
        model(x[:, :3])


def in_backward(watch: Callable[..., Any]) -> None:
    model, train = Net(), loader(2)
    watch(model, {"train": train})
    for batch in train:
        loss = loss_of(model, batch)
        loss.register_hook(lambda _: fail())
        loss.backward()


def in_a_second_backward(watch: Callable[..., Any]) -> None:
    model, train = Net(), loader(2)
    watch(model, {"train": train})
    for batch in train:
        loss = loss_of(model, batch)
        loss.backward()
        loss.backward()


def in_autograd_grad(watch: Callable[..., Any]) -> None:
    model, train = Net(), loader(2)
    watch(model, {"train": train})
    for batch in train:
        torch.autograd.grad(loss_of(model, batch), [torch.zeros(1, requires_grad=True)])


def in_the_loader(watch: Callable[..., Any]) -> None:
    train = DataLoader(Unreadable(), batch_size=2)
    watch(Net(), {"train": train})
    next(iter(train))


def in_a_worker(watch: Callable[..., Any]) -> None:
    train = DataLoader(Unreadable(), batch_size=2, num_workers=1)
    watch(Net(), {"train": train})
    next(iter(train))


def in_an_instrumented_iterable(watch: Callable[..., Any]) -> None:
    watch(Net())
    for _ in otel_train.watch(map(fails, range(2)), name="train"):
        pass


def in_the_optimizer(watch: Callable[..., Any]) -> None:
    model, train = Net(), loader(2)
    optimizer = Refusing(model.parameters(), lr=0.1)
    watch(model, {"train": train})
    for batch in train:
        loss_of(model, batch).backward()
        optimizer.step()


def in_the_scaler(watch: Callable[..., Any]) -> None:
    model, train = Net(), loader(2)
    optimizer, scaler = Refusing(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    watch(model, {"train": train})
    for batch in train:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)


def in_a_closure(watch: Callable[..., Any]) -> None:
    model, train = Failing(), loader(2)
    optimizer = sgd(model)
    watch(model, {"train": train})
    for batch in train:

        def closure(batch: Any = batch) -> Any:
            return loss_of(model, batch).item()

        optimizer.step(closure)


def in_a_stage(watch: Callable[..., Any]) -> None:
    watch(Net())

    @otel_train.stage("augment")
    def augment() -> None:
        fail()

    with otel_train.stage("outer"), otel_train.checkpoint():
        augment()


PLACES = {
    place.__name__: place
    for place in (
        in_forward, in_a_wrong_shape, in_backward, in_a_second_backward, in_autograd_grad, in_the_loader, in_a_worker,
        in_an_instrumented_iterable, in_the_optimizer, in_the_scaler, in_a_closure, in_a_stage,
    )
}  # fmt: skip

OURS = os.path.dirname(otel_train.__file__) + os.sep  # noqa: PTH120 - compared with the file names of frames


def seen(place: Callable[[Callable[..., Any]], None], watch: Callable[..., Any]) -> dict[str, Any]:
    """What the user gets to see when ``place`` fails."""
    try:
        place(watch)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return shown(error)
    raise AssertionError("it did not fail")


def shown(error: BaseException | None) -> dict[str, Any]:
    """Type, message, added lines, causes and frames; of torch's frames the names, for lines inside may differ."""
    if error is None:
        return {}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    return {
        "type": type(error),
        "args": [str(each) for each in error.args],
        "notes": getattr(error, "__notes__", []),
        "cause": shown(error.__cause__),
        "context": shown(error.__context__),
        "suppressed": error.__suppress_context__,
        "frames": [(f.filename, f.name) for f in frames],
        "lines": [(f.lineno, f.line) for f in frames if f.filename == __file__],
    }


def no_session(*_: Any, **__: Any) -> None:
    """Replaces ``instrument`` in the bare run."""


@pytest.mark.parametrize("name", PLACES)
def test_an_exception_looks_as_without_us(name: str, tmp_path: Path) -> None:
    """People debug by tracebacks: type, message, causes and frames are theirs."""
    place, sessions = PLACES[name], []

    def watch(*args: Any, **kwargs: Any) -> Any:
        sessions.append(otel_train.instrument(*args, **{**kwargs, **QUIET}, run_dir=str(tmp_path)))

    bare = seen(place, no_session)
    try:
        observed = seen(place, watch)
    finally:
        for session in sessions:
            session.close()

    if name == "in_a_worker":  # the message quotes the traceback of another process
        assert len(observed["args"][0].splitlines()) >= len(bare["args"][0].splitlines())
        assert "the user's own words" in observed["args"][0]
        del bare["args"], observed["args"]
    assert observed == bare


# --- ends ----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
instrumented, end, folder = sys.argv[1] == "instrumented", sys.argv[2], sys.argv[3]

def clean_up(number, frame):
    print("cleaning up")
    sys.exit(42)

if end == "handled":
    signal.signal(signal.SIGTERM, clean_up)
train = range(10**9)
if instrumented:
    import otel_train
    session = otel_train.instrument(
        None, {"train": train}, run_dir=folder, prometheus=False, console=False, otlp="off", tuning={"poll_interval_s": 0.02}
    )
    train = session.loaders["train"]

def loop():
    for i in train:
        if i == 3:
            if end == "finished":
                return
            if end == "raised":
                raise LookupError("the user's own words")
            if end == "dropped":
                os._exit(5)
            print("ready", flush=True)
            time.sleep(60)

loop()
"""


def run(
    tmp_path: Path, end: str, *, instrumented: bool, send: signal.Signals | None = None
) -> tuple[int, str, str, float]:
    """Status, output, complaints and how long the end took, in seconds."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    process = subprocess.Popen(
        [sys.executable, str(path), "instrumented" if instrumented else "bare", end, str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    lines: list[str] = []
    if send is not None:
        while (line := process.stdout.readline()) and line != "ready\n":
            lines.append(line)
        time.sleep(0.3)  # until it sleeps: the traceback names the line
        process.send_signal(send)
    began_s = time.monotonic()
    output, complaints = process.communicate(timeout=60)
    return process.returncode, "".join(lines) + output, complaints, time.monotonic() - began_s


def summary_below(folder: Path) -> dict[str, Any]:
    """What the only run below ``folder`` left behind; the agent may write it after the end, and correct it."""

    def written() -> dict[str, Any] | None:
        for path in folder.glob("*/rank0/summary.json"):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            closed = (path.parents[1] / "rank0.lock").read_text(encoding="utf-8").strip().endswith("closed")
            return found if closed and found["state"] != "running" else None
        return None

    return until(written, "a summary of a run that is over")


def without_ours(complaints: str) -> list[str]:
    """Complaints less the frames of our own files, each of which has a line of code and maybe one of marks."""
    kept, skipping = [], False
    for line in complaints.splitlines():
        if line.startswith('  File "'):
            skipping = line.startswith(f'  File "{OURS}')
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return kept


ENDS = [
    ("finished", None, "finished"),
    ("raised", None, "failed"),
    ("killed", signal.SIGTERM, "terminated"),
    ("handled", signal.SIGTERM, "terminated"),
    ("interrupted", signal.SIGINT, "interrupted"),
]


@pytest.mark.parametrize(("end", "send", "state"), ENDS, ids=[end for end, _, _ in ENDS])
def test_a_process_ends_as_without_us(
    end: str, send: signal.Signals | None, state: str, tmp_path: Path
) -> None:
    """Schedulers read the status, people the traceback, and later both read the summary."""
    bare = run(tmp_path, end, instrumented=False, send=send)
    observed = run(tmp_path, end, instrumented=True, send=send)

    assert observed[0] == bare[0]
    assert observed[1] == bare[1]
    assert without_ours(observed[2]) == bare[2].splitlines()
    assert observed[3] < bare[3] + 10
    summary = summary_below(tmp_path / "runs")
    assert summary["state"] == state
    assert summary["batches"]["train"] >= 4


def test_a_process_that_drops_dead_hangs_nowhere(tmp_path: Path) -> None:
    """``os._exit`` runs no exit handler; otel_train may not delay it."""
    bare = run(tmp_path, "dropped", instrumented=False)
    observed = run(tmp_path, "dropped", instrumented=True)

    assert observed[:3] == bare[:3] == (5, "", "")
    assert observed[3] < bare[3] + 10
