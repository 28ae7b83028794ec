"""Loops of several processes over gloo. Run as a program, once per rank: all of them, bare and instrumented."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.integration.loops.truth import EVAL, Net, NoSession, Truth, Watch, dataset, loader, sgd
from tests.support.loop_table import counted, shape_of
from tests.support.summary_laws import laws_of

PROGRAMS: dict[str, Callable[[Watch], Truth]] = {}


def parallel(program: Callable[[Watch], Truth]) -> Callable[[Watch], Truth]:
    """Enter a program in the table."""
    PROGRAMS[program.__name__] = program
    return program


def shared_loader(batches: int = 5) -> DataLoader[Any]:
    """So many batches for each of two ranks."""
    rows = dataset(batches * 2)
    return DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))


def one_pass(truth: Truth, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> Truth:
    """One pass."""
    truth.train_on(model, optimizer, batches)
    return truth


@parallel
def data_parallel(watch: Watch) -> Truth:
    """``DistributedDataParallel`` is what the session receives."""
    model, train = DistributedDataParallel(Net()), shared_loader()
    watch(model, {"train": train})
    return one_pass(Truth(), model, sgd(model), train)


@parallel
def data_parallel_around_an_instrumented_model(watch: Watch) -> Truth:
    """The inner model is given, and wrapped afterwards; two backwards of three without synchronisation."""
    inner, train, truth = Net(), shared_loader(6), Truth()
    watch(inner, {"train": train})
    model = DistributedDataParallel(inner)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(train):
        truth.batch("train")
        last = i % 3 == 2
        model.require_backward_grad_sync = last
        truth.forward()
        truth.backward(nn.functional.cross_entropy(model(x), y))
        if last:
            truth.update_that_ends_a_step(optimizer)
    return truth


@parallel
def data_parallel_evaluated_inside(watch: Watch) -> Truth:
    """Trained through the wrapper, evaluated without it: under ``no_grad``, then in evaluation mode with gradients on."""
    model, train, val, truth = DistributedDataParallel(Net()), shared_loader(), shared_loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for grad in (False, True):
        model.train()
        one_pass(truth, model, optimizer, train)
        model.eval()
        for x, _ in val:
            truth.batch("val")
            truth.forward(EVAL)
            with torch.set_grad_enabled(grad):
                model.module(x)
            truth.step(EVAL)
    return truth


@parallel
def data_parallel_compiled(watch: Watch) -> Truth:
    """The inner model is given; what the loop calls is compiled around its wrapper."""
    inner, train = Net(), shared_loader()
    watch(inner, {"train": train})
    model = torch.compile(DistributedDataParallel(inner), backend="eager")
    return one_pass(Truth(), model, sgd(inner), train)


def sharded() -> Net:
    """Layers first, then the whole, as the tutorial of FSDP2 does."""
    model = Net()
    for layer in (model.first, model.last):
        fully_shard(layer)
    fully_shard(model)
    return model


@parallel
def fully_sharded(watch: Watch) -> Truth:
    """``fully_shard`` changes the class of the model in place; the session comes after."""
    model, train = sharded(), shared_loader()
    watch(model, {"train": train})
    return one_pass(Truth(), model, sgd(model), train)


@parallel
def fully_sharded_after_the_session(watch: Watch) -> Truth:
    """The same the other way round."""
    model, train = Net(), shared_loader()
    watch(model, {"train": train})
    fully_shard(model)
    return one_pass(Truth(), model, sgd(model), train)


@parallel
def tensor_parallel(watch: Watch) -> Truth:
    """Each layer is split over both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(Net(), mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    train = loader(5)
    watch(model, {"train": train})
    return one_pass(Truth(), model, sgd(model), train)


class Part(nn.Linear):
    """A part of a model that counts its own forwards: the schedule calls it."""

    def __init__(self, inputs: int, outputs: int, truth: Truth) -> None:
        super().__init__(inputs, outputs)
        self.truth = truth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.truth.forward()
        return super().forward(x)


@parallel
def pipeline(watch: Watch) -> Truth:
    """A stage per rank, two micro-batches: a forward and a backward each, and one forward to learn the shapes."""
    rank, train, truth = dist.get_rank(), loader(5), Truth()
    part = Part(4, 8, truth) if rank == 0 else Part(8, 2, truth)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.cross_entropy)
    optimizer = sgd(part)
    watch(part, {"train": train})
    for x, y in train:
        truth.batch("train")
        truth.backward()
        truth.backward()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        truth.update_that_ends_a_step(optimizer)
    return truth


def row(name: str, folder: Path) -> dict[str, Any]:
    """A program, bare and instrumented, on this rank."""
    weights, truth, summary = [], Truth(), {}
    for disabled in (True, False):
        torch.manual_seed(0)
        watch = Watch(folder / name, disabled=disabled)
        truth = PROGRAMS[name](watch)
        watch.close()
        weights.append(watch.weights())
        summary = watch.sessions[-1].summary()
        dist.barrier()
    shape, description = shape_of(PROGRAMS[name])
    program = truth.counted()
    return {
        "shape": shape, "description": description, "program": program, "in_code": counted(summary),
        "same_weights": weights[0] == weights[1], "faults": summary["telemetry"]["faults"],
        "instrumentation_gaps": summary["instrumentation_gaps"], "laws": laws_of(summary),
    }  # fmt: skip


def main() -> None:
    """Every program, one after the other, bare and instrumented; or those that are named, without otel_train."""
    dist.init_process_group("gloo")
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rows: Any = {}
    for name in names or PROGRAMS:
        if names:
            torch.manual_seed(0)
            rows[name] = PROGRAMS[name](NoSession()).counted()  # type: ignore[arg-type]  # called like one
        else:
            rows[name] = row(name, folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
