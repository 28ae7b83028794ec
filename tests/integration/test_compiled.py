"""What the compiler of torch makes of a loop is what it makes of it without us."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.integration.loops import compiled
from tests.integration.loops.truth import LOOPS, Net, Truth, Watch, loader, sgd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = sorted(name for name, program in LOOPS.items() if program.__module__ == compiled.__name__)


class Made(NamedTuple):
    """What TorchDynamo did for a program. A recompile is one more frame, and one more graph where it has one."""

    frames: int
    graphs: int
    breaks: int


def compiling(name: str, folder: Path, **settings: bool) -> tuple[Made, Watch]:
    """Run a program with an empty cache of compiled code."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    watch = Watch(folder, **settings)
    torch.manual_seed(0)
    try:
        LOOPS[name](watch)
    finally:
        watch.close()
    made = Made(
        counters["frames"]["total"], counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    )
    return made, watch


@pytest.mark.parametrize("name", PROGRAMS)
def test_watching_adds_no_graph_break_and_no_recompile(name: str, tmp_path: Path) -> None:
    """A graph that breaks at a hook runs slower for the whole job: the cost of watching that no timer shows."""
    bare, untouched = compiling(name, tmp_path, disabled=True)
    ours, instrumented = compiling(name, tmp_path)

    assert bare.graphs > 0
    assert ours.graphs == bare.graphs
    assert ours.breaks <= bare.breaks
    if not bare.breaks:  # where torch's own breaks, frames depend on where it goes on
        assert ours.frames == bare.frames
    assert instrumented.weights() == untouched.weights()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++ on the CPU")
def test_a_model_that_inductor_compiled_is_seen(tmp_path: Path) -> None:
    """The other tests use quick backends; this is the one that users have."""
    model, train, watch = Net(), loader(5), Watch(tmp_path)
    optimizer = sgd(model)
    session = watch(model, {"train": train})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor has much to say
        fast = torch.compile(model, fullgraph=True)
        for batch in train:
            Truth().learn(fast, optimizer, batch)
    watch.close()
    counts = {row["stage"]: row["count"] for row in session.summary()["stages"]}

    assert {stage: counts[stage] for stage in ("data", "forward", "backward", "optimizer")} == {
        "data": 5, "forward": 5, "backward": 5, "optimizer": 5,
    }  # fmt: skip
