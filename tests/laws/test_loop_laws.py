"""What holds for a loop of any shape: a summary counts what the loop itself counts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import otel_train
from tests.integration.loops.truth import EAGER, EVAL, TRAIN, Truth, Watch, loss_of
from tests.integration.test_loops import expected, found
from tests.support.summary_laws import laws_of


class Shape(NamedTuple):
    """A loop.

    Attributes:
        drawn: how training batches are drawn; see ``DRAWN``.
        batches: in the training loader.
        epochs: times that batches are drawn so.
        accumulated: batches per update.
        updates: in a row.
        skipped: every so-manieth batch is not used; 0: none.
        teacher: a forward without gradients comes before that of training.
        stage: what a user stage is around.
        evaluated: when the model is evaluated.
        glance: batches of an evaluation; 0: the whole loader, 1: ``next(iter(loader))``.
        gradients: what evaluation runs in.
        saved: a checkpoint follows an evaluation.
    """

    drawn: str
    batches: int
    epochs: int
    accumulated: int
    updates: int
    skipped: int
    teacher: bool
    stage: str
    evaluated: frozenset[str]
    glance: int
    gradients: Callable[[], Any]
    saved: bool


def one_after_the_other(train: Any) -> Iterator[Any]:
    yield from train


def with_next(train: Any) -> Iterator[Any]:
    iterator = iter(train)
    with contextlib.suppress(StopIteration):
        while True:
            yield next(iterator)


def one_ahead(train: Any) -> Iterator[Any]:
    iterator = iter(train)
    present = next(iterator, None)
    while present is not None:
        following = next(iterator, None)
        yield present
        present = following


def some(train: Any) -> Iterator[Any]:
    yield from itertools.islice(train, 2)


def broken_off(train: Any) -> Iterator[Any]:
    for number, batch in enumerate(train):
        yield batch
        if number:
            break


DRAWN = {each.__name__: each for each in (one_after_the_other, with_next, one_ahead, some, broken_off)}
ENDLESS = "endless"
"""All epochs draw from one generator, which begins the loader anew."""


class Program:
    """Runs a loop of a shape, and counts."""

    def __init__(self, shape: Shape, watch: Watch) -> None:
        self.shape = shape
        self.truth: Truth
        self.truth, (self.model, self.optimizer, self.train, self.val) = watch.training(
            {"train": shape.batches, "val": 2}, partial=None
        )
        self._endless = itertools.chain.from_iterable(itertools.repeat(self.train))
        self._seen = self._waiting = 0

    def run(self) -> None:
        shape = self.shape
        if "before" in shape.evaluated:
            self._evaluate()
        for _ in range(shape.epochs):
            self.model.train()
            with self._around("epoch"):
                batches = (
                    itertools.islice(self._endless, 4)
                    if shape.drawn == ENDLESS
                    else DRAWN[shape.drawn](self.train)
                )
                for batch in batches:
                    self._use(batch)
            if "after" in shape.evaluated:
                self._evaluate()

    @contextlib.contextmanager
    def _around(self, what: str) -> Iterator[None]:
        if self.shape.stage != what:
            yield
            return
        with otel_train.stage(what):
            yield
        self.truth.stages[what] += 1

    def _use(self, batch: Any) -> None:
        shape, truth = self.shape, self.truth
        truth.batch("train")
        self._seen += 1
        if shape.skipped and self._seen % shape.skipped == 0:
            return
        if shape.teacher:
            truth.forward()
            with torch.no_grad():
                self.model(batch[0])
        with self._around("batch"):
            truth.backward(truth.loss(self.model, batch))
        self._waiting += 1
        if self._waiting == shape.accumulated:
            self._waiting = 0
            for _ in range(shape.updates):
                truth.update_that_ends_a_step(self.optimizer)
            if "within" in shape.evaluated and truth.steps[TRAIN] % 2 == 0:
                self._evaluate()
                self.model.train()

    def _evaluate(self) -> None:
        shape, truth = self.shape, self.truth
        self.model.eval()
        with shape.gradients():
            batches = [next(iter(self.val))] if shape.glance == 1 else self.val
            for number, batch in enumerate(batches, 1):
                truth.batch("val")
                truth.forward(EVAL)
                loss_of(self.model, batch)
                truth.step(EVAL)
                if number == shape.glance:
                    break
        if shape.saved:
            with otel_train.checkpoint():
                truth.checkpoints += 1


ORDINARY = Shape(
    drawn="one_after_the_other", batches=4, epochs=2, accumulated=1, updates=1, skipped=0, teacher=False, stage="",
    evaluated=frozenset({"after"}), glance=0, gradients=torch.no_grad, saved=False,
)  # fmt: skip

shapes = st.builds(
    Shape,
    drawn=st.sampled_from([*DRAWN, ENDLESS]),
    batches=st.integers(3, 6),
    epochs=st.integers(1, 3),
    accumulated=st.integers(1, 3),
    updates=st.integers(1, 2),
    skipped=st.sampled_from([0, 0, 3, 5]),
    teacher=st.booleans(),
    stage=st.sampled_from(["", "", "batch", "epoch"]),
    evaluated=st.frozensets(st.sampled_from(["before", "within", "after"])),
    glance=st.integers(0, 2),
    gradients=st.sampled_from([torch.no_grad, torch.inference_mode, contextlib.nullcontext]),
    saved=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(shapes)
@example(ORDINARY._replace(drawn="one_ahead", teacher=True))
@example(ORDINARY._replace(drawn="one_ahead", teacher=True, skipped=3, batches=4))
@example(ORDINARY._replace(stage="epoch"))
def test_a_loop_is_counted_as_it_counts_itself(shape: Shape) -> None:
    """The table of loops has shapes that someone thought of. This one combines them."""
    with TemporaryDirectory() as folder:
        watch = Watch(Path(folder), **EAGER)
        try:
            program = Program(shape, watch)
            program.run()
        finally:
            watch.close()
        summary = watch.sessions[0].summary()

    seen, said = found(summary, program.truth), expected(program.truth)
    if not program.truth.updates:  # steps are then counted by something else
        for values in (seen, said):
            del values["steps"], values["source"]
    assert seen == said
    assert list(laws_of(summary)) == []
