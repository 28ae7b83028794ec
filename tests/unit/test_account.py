"""Small loops, each counted by head. docs/reference/step-boundaries.md says what a step, a phase and a stage are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from otel_train.accounting.account import ThreadAccount
from otel_train.accounting.batches import Batch
from otel_train.accounting.types import SourceTable
from otel_train.recording.events import Flag, Op, SourceKind
from tests.support.edges import TRAINING, Book, Tape, account_for, phase_name

MICRO = 55
STEP = 62
"""See ``Tape.micro`` and ``Tape.step``."""

CACHES = Flag.TRAINING
"""Of a forward without gradients in training mode."""

DATA, FORWARD, BACKWARD, OPTIMIZER = (
    SourceKind.DATA, SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER,
)  # fmt: skip
STAGE, SCALER, WHOLE, CHECKPOINT = (
    SourceKind.STAGE, SourceKind.SCALER, SourceKind.WHOLE, SourceKind.CHECKPOINT,
)  # fmt: skip

FOUND: dict[str, Callable[[Book], Any]] = {
    "durations": lambda book: book.durations(),
    "evals": lambda book: book.durations("eval"),
    "partial": lambda book: book.partial(),
    "spans": lambda book: [step.ended_ns - step.started_ns for step in book.steps("train")],
    "samples": lambda book: [step.samples for step in book.steps() if step.counted],
    "failed": lambda book: [step.failed for step in book.steps("train") if step.counted],
    "labels": lambda book: {step.phase: step.loader for step in book.steps()},
    "count": lambda book: book.count(),
    "owner": lambda book: book.self_ns("owner"),
    "inclusive": lambda book: dict(book.inclusive_ns()),
    "phase": lambda book: book.self_ns("phase"),
    "activity": lambda book: book.self_ns("activity"),
    "updates": lambda book: (book.updates, book.skipped_updates),
    "batches": lambda book: book.batches(),
    "numbers": lambda book: book.numbers,
    "endings": lambda book: [source for part in book.closed for source, *_ in part.endings.tolist()],
    "other_after": lambda book: book.other_after(),
    "failed_asks": lambda book: sum(len(part.failed_asks) for part in book.closed),
}
"""What a row of the table may speak of."""


def loop(sentence: str, tape: Tape, **expected: Any) -> Any:
    """A row: what holds, the edges, and what the account of them is. ``calls``: inclusive time and failure by source."""
    return pytest.param(tape, expected, id=sentence)


def times(count: int, part: Callable[[Tape], object]) -> Tape:
    return Tape().repeat(count, part)


@pytest.mark.parametrize(("tape", "expected"), [
    loop("time in no stage is known by the stage before it, and that of an evaluation is not training",
         times(3, lambda tape: tape.ask().spend(1).forward().spend(2).backward().spend(3).update().spend(100))
         .stop().ask("val").spend(50).forward(flags=0).spend(60).stop("val"),
         other_after={"code": 3, "model": 6, "backward": 9, "SGD": 300}),
    loop("a plain loop has one step per update",
         times(3, Tape.step).stop(), durations=[STEP] * 3, partial=[], updates=(3, 0),
         count={"code": 3, "model": 3, "backward": 3, "SGD": 3},
         owner={"code": 20, "model": 60, "backward": 90, "SGD": 21},
         activity={"data_wait": 20, "productive": 171}),
    loop("time before the first stage is init, and gaps are of no stage",
         Tape(started_ns=100).spend(40).repeat(2, lambda t: t.step().spend(3)).stop(), durations=[STEP + 3] * 2,
         activity={"init": 40, "data_wait": 15, "productive": 120},
         owner={"": 46, "code": 15, "model": 40, "backward": 60, "SGD": 14}),
    loop("accumulation is one step per update, and the remainder is partial",
         times(2, lambda t: t.micro().micro().update()).micro().stop(),
         durations=[MICRO * 2 + 7] * 2, partial=[MICRO], phase={"train": 2 * 117 + 60}),
    # The gradients are still there, so the step is still open.
    loop("a remainder goes on in the next epoch",
         Tape().micro().micro().update().micro().stop().micro().update().stop(), durations=[117, MICRO + MICRO + 7]),
    # One step, two loaders asked; the label is the one fetched last.
    loop("zipped loaders fetch one batch together",
         times(3, lambda t: t.ask("code", 5, samples=4).ask("prose", 6, samples=2).forward().backward().update()
               ).stop("code"),
         durations=[5 + 6 + 57] * 3, samples=[6, 6, 6], labels={"train": "prose"},
         count={"code": 3, "prose": 3, "model": 3, "backward": 3, "SGD": 3},
         batches={"code": [("train", 4)] * 3, "prose": [("train", 2)] * 3}),
    # ``nxt = next(it)`` before the work on ``batch``, as accelerate does.
    loop("a loader that looks ahead gives one step per update",
         Tape().ask().repeat(3, lambda t: t.ask().forward().backward().update()).stop().forward().backward().update(),
         durations=[5 + STEP, STEP, STEP, STEP - 5], phase={"train": 5 + 4 * STEP}),
    # The first ask after an update closes its step, wherever in the loop it stands.
    loop("a loader that looks ahead between backward and update gives one step per update",
         Tape().ask().repeat(3, lambda t: t.forward().backward().ask().update()),
         durations=[5 + 50 + 5 + 7 + 50, STEP, 5 + 7]),
    loop("two optimizers in one batch are one step",
         times(3, lambda t: t.micro().update(7, "D").forward().backward().update(9, "G")),
         durations=[MICRO + 7 + 50 + 9] * 3, updates=(6, 0)),
    loop("two optimizers without asks close before the first updates again",
         times(3, lambda t: t.forward().backward().update(7, "D").forward().backward().update(9, "G")),
         durations=[50 + 7 + 50 + 9] * 3),
    # PPO: several epochs over one rollout, no ask between.
    loop("an optimizer that updates twice in a row closes a step each time",
         Tape().ask().repeat(3, lambda t: t.forward().backward().update()).ask().forward().backward().update(),
         durations=[5 + 57, 57, 57, STEP]),
    # D, G, G: the second G begins a step of its own.
    loop("the second optimizer twice in a row closes a step",
         Tape().ask().update(7, "D").update(9, "G").spend(2).update(9, "G").ask().update(7, "D"),
         durations=[5 + 7 + 9, 2 + 9, 5 + 7]),
    # An optimizer per parameter, in the hooks of its gradient: the 16th and all later ones of a class have one name.
    loop("updates inside one backward are of one step, also of optimizers that share a name",
         times(3, lambda t: t.forward().begin(BACKWARD, "backward").spend(9)
               .repeat(5, lambda t: t.update(1, "SGD_16")).update(2, "SGD").end(BACKWARD, "backward")),
         durations=[20 + 9 + 5 + 2] * 3, partial=[], updates=(18, 0)),
    # LBFGS evaluates the model several times in one update.
    loop("a closure runs inside the optimizer and is cut out of it",
         times(2, lambda t: t.ask().begin(OPTIMIZER, "LBFGS").spend(1).forward().backward().spend(1)
               .forward().backward().spend(1).end(OPTIMIZER, "LBFGS")).stop(),
         durations=[5 + 103] * 2, owner={"code": 15, "model": 80, "backward": 120, "LBFGS": 6},
         calls={"LBFGS": [(103, 0), (103, 0)]}, count={"code": 2, "model": 4, "backward": 4, "LBFGS": 2}),
    # A wrapper such as SAM or Lookahead steps its inner optimizer.
    loop("an update inside an update is none",
         times(2, lambda t: t.micro().begin(OPTIMIZER, "SAM").spend(2).update(3, "SGD").spend(2).end(OPTIMIZER, "SAM")),
         durations=[MICRO + 7] * 2, updates=(2, 0), count={"code": 2, "model": 2, "backward": 2, "SAM": 2},
         owner={"code": 10, "model": 40, "backward": 60, "SAM": 14}),
    # The post hook of a raising step never runs.
    loop("an optimizer that raised is closed by the next ask",
         Tape().step().micro().begin(OPTIMIZER, "SGD").spend(4).step().stop(), durations=[STEP, MICRO + 4 + STEP],
         updates=(2, 0), calls={"SGD": [(7, 0), (4, 1), (7, 0)]}, failed=[0, 1]),
    loop("without a loader, an optimizer that raised is closed by its own next step",
         Tape().forward().backward().begin(OPTIMIZER, "SGD").spend(4).forward().backward().update(),
         updates=(1, 0), calls={"SGD": [(54, 1), (7, 0)]}, count={"model": 2, "backward": 2, "SGD": 2}),
    loop("a hook of an optimizer that asks a loader is inside its update, also of the loader of the loop",
         times(2, lambda t: t.micro().begin(OPTIMIZER, "SGD").spend(4).ask("code", 6).spend(3).end(OPTIMIZER, "SGD")
               ).stop(), durations=[MICRO + 13] * 2, updates=(2, 0), failed=[0, 0],
         owner={"model": 40, "backward": 60, "SGD": 14, "code": 27}),
    loop("a hook of an optimizer that evaluates is no failure",
         times(2, lambda t: t.micro().begin(OPTIMIZER, "SGD").spend(4).validate(2).end(OPTIMIZER, "SGD")).stop(),
         updates=(2, 0), failed=[0, 0], evals=[16] * 4),
    # A memory bank, and noise of a gradient hook: parts of the batch in hand.
    loop("a loader that is asked inside a forward gives a part of the batch in hand",
         times(2, lambda t: t.ask().begin(FORWARD, "model", flags=TRAINING).ask("bank", 4).spend(16)
               .end(FORWARD, "model").backward().update())
         .ask("val", 2).begin(FORWARD, "model").ask("bank", 4).spend(7).end(FORWARD, "model").stop("val"),
         durations=[STEP] * 2, evals=[13], phase={"train": 2 * STEP, "eval": 13 + 5}, count={"code": 2, "bank": 3, "model": 3, "backward": 2, "SGD": 2, "val": 1},
         batches={"code": [("train", -1)] * 2, "bank": [("train", -1)] * 2 + [("eval", -1)], "val": [("eval", -1)]},
         owner={"code": 10, "bank": 12, "model": 39, "backward": 60, "SGD": 14, "val": 7}),
    loop("a loader that is asked inside a backward gives a part of the batch in hand",
         times(2, lambda t: t.ask().forward().begin(BACKWARD, "backward").ask("noise", 4).spend(26)
               .end(BACKWARD, "backward").update()).validate(2),
         durations=[STEP] * 2, evals=[16] * 2, labels={"train": "code", "eval": "val"},
         calls={"backward": [(30, 0)] * 2}, owner={"code": 10, "noise": 8, "model": 62, "backward": 52, "SGD": 14, "val": 15}),
    loop("a model that draws its own batch begins it with its forward",
         times(2, lambda t: t.begin(FORWARD, "model", flags=TRAINING).spend(1).ask("code", 5).spend(14)
               .end(FORWARD, "model").backward().update().spend(2))
         .repeat(2, lambda t: t.begin(FORWARD, "model").ask("val", 5).spend(7).end(FORWARD, "model")),
         durations=[20 + 37 + 2, 20 + 37], evals=[12] * 2, labels={"train": "code", "eval": "val"},
         batches={"code": [("train", -1)] * 2, "val": [("eval", -1)] * 2}),
    loop("a loop inside a forward has the steps and evaluations of its loop",
         times(2, lambda t: t.begin(FORWARD, "learner", flags=TRAINING)
               .repeat(2, lambda t: t.ask().backward().update()).ask("val").spend(9).end(FORWARD, "learner")
               .begin(FORWARD, "learner").repeat(2, lambda t: t.ask("val", 5).spend(11)).stop("val").end(FORWARD, "learner")),
         updates=(4, 0), labels={"train": "code", "eval": "val"}, count={"code": 4, "val": 6, "learner": 4, "backward": 4, "SGD": 4}),
    loop("a closure may ask a loader that nothing has asked before",
         times(2, lambda t: t.ask().begin(OPTIMIZER, "LBFGS", flags=Flag.CLOSURE).ask("more").forward().backward()
               .ask("more").forward().backward().end(OPTIMIZER, "LBFGS")).stop(),
         updates=(2, 0), failed=[0, 0], count={"code": 2, "more": 4, "model": 4, "backward": 4, "LBFGS": 2}),
    loop("a closure that raised is closed by the next ask, also of a loader that is new",
         Tape().ask().begin(OPTIMIZER, "LBFGS", flags=Flag.CLOSURE).forward().validate(1).step().stop(),
         updates=(1, 0), calls={"LBFGS": [(20, 1)], "SGD": [(7, 0)]}, evals=[16]),
    loop("an optimizer that raised in a stage is closed by the end of the stage",
         Tape().ask().begin(STAGE, "learn").begin(OPTIMIZER, "SGD").spend(4).ask().spend(2).end(STAGE, "learn", op=Op.FAIL)
         .step().stop(), updates=(1, 0), calls={"SGD": [(4, 1), (7, 0)]}),
    loop("an optimizer that raised last of all is closed by the end",
         Tape().step().micro().begin(OPTIMIZER, "SGD").spend(4).ask().stop(), updates=(1, 0),
         calls={"SGD": [(7, 0), (4, 1)]}),
    # A slow validation must not read as a slow training step.
    loop("validation between updates closes the step and is steps of its own",
         Tape().step().step().validate(2).step().step().stop(), durations=[STEP] * 4, evals=[16, 16],
         activity={"data_wait": 25, "productive": 228, "eval": 16 + 16 + 5}, labels={"train": "code", "eval": "val"}),
    loop("validation in mid-group suspends the step",
         Tape().micro().validate(2).micro().update().stop(), durations=[117], spans=[117 + 37], evals=[16, 16]),
    # Trainers evaluate a few batches first, to find errors early.
    loop("the end of an evaluation before training is no sign that a slow first group has no update",
         Tape().validate(2).repeat(4, lambda t: t.micro().spend(2 * 10**9)).update().step().stop(),
         durations=[4 * (MICRO + 2 * 10**9) + 7, STEP], evals=[16, 16], partial=[]),
    loop("gradients of 128 batches are one step, also the first",
         times(2, lambda t: t.repeat(128, Tape.micro).update()).stop(), durations=[128 * MICRO + 7] * 2),
    loop("a closure that makes many gradients is inside an update, also the first",
         times(2, lambda t: t.begin(OPTIMIZER, "LBFGS", flags=Flag.CLOSURE).repeat(310, Tape.micro).stop()
               .end(OPTIMIZER, "LBFGS").validate(1)), updates=(2, 0),
         evals=[16] * 2, durations=[310 * MICRO] * 2),
    loop("an update after a slow pass is that of all its gradients",
         Tape().repeat(3, lambda t: t.repeat(4, lambda t: t.micro().spend(2 * 10**9)).stop().update().validate(1)),
         durations=[4 * (MICRO + 2 * 10**9) + 7] * 3, evals=[16] * 3, partial=[]),
    # accelerate looks one batch ahead: the end of the pass is known before its last batch is used.
    loop("so it is where the last batch of the pass is used after its end",
         Tape().repeat(3, lambda t: t.ask().repeat(3, lambda t: t.ask().forward().backward().spend(2 * 10**9)).stop()
                       .forward().backward().update()),
         durations=[4 * MICRO + 3 * 2 * 10**9 + 7] * 3, partial=[]),
    loop("a slow group of batches that are drawn by iterators of their own is one step",
         Tape().repeat(8, lambda t: t.ask(iterator=1).dispose("code", 1).forward().backward()
                       .ask(iterator=2).dispose("code", 2).forward().spend(6 * 10**9).backward().update()),
         durations=[2 * MICRO + 6 * 10**9 + 7] * 8),
    # The memory of a device is often too small for the first backward.
    loop("a backward that raised is no step where backwards are the steps",
         Tape().micro().ask().forward().run(SourceKind.BACKWARD, "backward", 30, end=Op.FAIL).micro().ask().forward()
         .run(SourceKind.BACKWARD, "backward", 30, end=Op.FAIL),
         durations=[MICRO, 2 * MICRO], partial=[MICRO], evals=[]),
    # A wrong shape, in the first batch of all.
    loop("a batch in which the model raised is no step where batches are the steps",
         Tape().repeat(2, lambda t: t.ask().run(FORWARD, "model", 20, flags=3, end=Op.FAIL)).dispose("code"),
         durations=[], partial=[50], evals=[]),
    # ``print(model(batch).shape)``, or a forward that makes lazy parameters.
    loop("a forward with gradients before the first pass that trains is evaluation, and what follows it is of no step",
         Tape().forward().spend(50).repeat(2, Tape.step).stop(), durations=[STEP] * 2, evals=[20],
         activity={"data_wait": 15, "productive": 114, "eval": 20, "outside": 50}),
    loop("so it is before an evaluation",
         Tape().forward().spend(50).validate(1).spend(9).step().stop(), durations=[STEP], evals=[20, 16],
         activity={"data_wait": 10, "productive": 57, "eval": 20 + 21, "outside": 59}),
    loop("so it is on a batch of another pass",
         Tape().ask(iterator=1).dispose("code", 1).forward().spend(50)
         .repeat(2, lambda t: t.ask(iterator=2).forward().backward().update()).stop(iterator=2), evals=[20],
         durations=[STEP, STEP], activity={"data_wait": 20, "productive": 114, "eval": 20, "outside": 50}),
    # Gradient caching, as open_clip's ``--accum-freq``: features of the whole group, then the batches again with gradients.
    loop("batches forwarded without gradients in training mode are of the step of a later batch of their pass",
         times(2, lambda t: t.repeat(2, lambda t: t.ask().forward(11, flags=CACHES)).ask().forward(11, flags=CACHES)
               .repeat(3, lambda t: t.forward().backward()).update()).stop(),
         durations=[3 * 16 + 3 * 50 + 7] * 2, evals=[], count={"code": 6, "model": 12, "backward": 6, "SGD": 2},
         batches={"code": [("train", -1)] * 6}),
    loop("so they are where an evaluation comes before it",
         times(2, lambda t: t.ask().forward(11, flags=CACHES).ask().forward(11, flags=CACHES).forward().backward().update()
               .validate(1)).stop(),
         durations=[2 * 16 + 57] * 2, evals=[16] * 2),
    # Pseudo-labels: ``if confidence < threshold: continue`` after the teacher, and the like.
    loop("a batch that is skipped after a teacher ran in a pass that has trained is of the step of the next one",
         Tape().repeat(4, lambda t: t.ask().forward(11, "teacher", flags=0).forward().backward().update()
                       .ask().forward(11, "teacher", flags=0)).stop(),
         durations=[16 + 57, *[32 + 57] * 3], partial=[16], evals=[], batches={"code": [("train", -1)] * 8}),
    loop("so it is if the model itself ran in evaluation mode, and not if the next batch trains without such a forward",
         Tape().repeat(2, lambda t: t.ask().forward(11, flags=0).forward().backward().update())
         .repeat(2, lambda t: t.ask().forward(11, flags=0)).ask().forward(11, flags=0).forward().backward().update()
         .repeat(2, lambda t: t.ask().forward(11, flags=0)).step(),
         durations=[16 + 57, 16 + 57, 3 * 16 + 57, STEP], evals=[16] * 2),
    loop("a model that is evaluated on batches of the loop, each of which trains after a teacher, is evaluated",
         Tape().repeat(2, lambda t: t.ask().forward(11, "teacher", flags=0).forward().backward().update()
                       .repeat(3, lambda t: t.ask().forward(12, flags=0))).step(),
         durations=[16 + 57, 16 + 57, STEP], evals=[17] * 6),
    loop("the rest of a pass in which no batch trains any more is evaluation",
         Tape().step().step().repeat(3, lambda t: t.ask().forward(11, flags=0)).stop(),
         durations=[STEP] * 2, evals=[16] * 3),
    loop("what is left of a group at the end of a pass that trains goes on in the next",
         times(2, lambda t: t.ask().forward(11, flags=CACHES).ask().forward(11, flags=CACHES).forward().backward().update()
               .ask().forward(11, flags=CACHES).stop()),
         durations=[2 * 16 + 57, 3 * 16 + 57], partial=[16], evals=[]),
    loop("a pass without gradients in training mode is evaluation",
         times(2, lambda t: t.repeat(2, Tape.step).stop().repeat(3, lambda t: t.ask().forward(11, flags=CACHES)).stop()),
         durations=[STEP] * 4, evals=[16] * 6),
    loop("so it is in a run that never trains",
         times(3, lambda t: t.ask().forward(11, flags=CACHES)).stop(), durations=[], evals=[16] * 3),
    loop("so it is before an inner pass that trains",
         times(2, lambda t: t.ask("prompts").forward(11, flags=CACHES).step().stop()).stop("prompts"),
         durations=[STEP] * 2, evals=[16] * 2),
    # ``with torch.no_grad(): model(next(it))``, and the next step goes on with the same iterator.
    loop("so it is where the batch that trains next has no such forward of its own",
         times(3, lambda t: t.step().repeat(2, lambda t: t.ask().forward(11, flags=CACHES))).step(),
         durations=[STEP] * 4, evals=[16] * 6),
    loop("so it is there at the end of the pass",
         times(2, lambda t: t.step().repeat(2, lambda t: t.ask().forward(11, flags=CACHES)).stop()),
         durations=[STEP] * 2, evals=[16] * 4),
    loop("so it is after batches of another pass that trains, which was left",
         Tape().ask(iterator=1).forward(11, flags=CACHES).ask(iterator=1).forward(11, flags=CACHES).dispose("code", 1)
         .repeat(2, lambda t: t.ask(iterator=2).forward().backward().update()).stop(iterator=2),
         durations=[STEP] * 2, evals=[16] * 2),
    loop("so it is where a name says evaluation, or more batches than a group has come first",
         times(2, lambda t: t.step().stop().ask("val").forward(11, flags=CACHES).ask("val").forward().backward().update().stop("val"))
         .repeat(70, lambda t: t.ask("other").forward(11, flags=CACHES)).ask("other").forward().backward().update(),
         durations=[STEP] * 5, evals=[16] * 72),
    # ``with torch.no_grad(): z = model.encoder(x)``, then ``model.head(z)``, without a loader.
    loop("forwards without gradients of a part that never trains are of the step",
         times(3, lambda t: t.forward(11, flags=0, part=1).forward(part=2).backward().update()),
         durations=[68] * 3, evals=[]),
    loop("those of a part that has trained before are evaluation, although another part trains next",
         Tape().forward(part=1).backward().update()
         .repeat(2, lambda t: t.forward(11, flags=0, part=1).forward(part=2).backward().update()),
         durations=[57] * 3, evals=[11] * 2),
    loop("those of a target network that is a part, after an action of the part that trains, are of the step",
         Tape().forward(part=1).backward().update()
         .repeat(2, lambda t: t.forward(11, flags=0, part=1).forward(13, flags=0, part=2).forward(part=1).backward().update()),
         durations=[57, 70, 70], evals=[11] * 2),
    loop("so are those of a part where the whole model trains",
         times(3, lambda t: t.forward(11, flags=0, part=1).forward().backward().update()), durations=[57] * 3, evals=[11] * 3),
    loop("so are those of the whole model where a part trains",
         times(3, lambda t: t.forward(11, flags=0).forward(part=1).backward().update()), durations=[57] * 3, evals=[11] * 3),
    # ``for i, batch in enumerate(loader): if i == steps: break``, the most usual way to stop.
    loop("a batch in hand where the loop leaves its training is of no step: its wait is data, the rest outside",
         Tape().repeat(2, lambda t: t.repeat(2, lambda t: t.ask(iterator=1).forward().backward().update()).ask(iterator=1).spend(3).dispose("code", 1).spend(9)),
         durations=[STEP] * 4, partial=[], activity={"data_wait": 30, "productive": 4 * 57, "outside": 24}),
    loop("so is one that the loop ends with, whose iterator stays",
         Tape().step().step().ask().spend(40), durations=[STEP] * 2, partial=[],
         activity={"data_wait": 15, "productive": 2 * 57, "outside": 40}),
    # As of a loader with persistent workers.
    loop("so is one whose iterator stays, after an evaluation",
         Tape().step().step().ask().ask("val").forward(flags=0).stop("val"), durations=[STEP] * 2, evals=[25], partial=[]),
    loop("so is one of a loop that marks its steps",
         times(2, lambda t: t.ask(iterator=1).forward().backward().update().mark().ask(iterator=1).dispose("code", 1).spend(9)),
         durations=[STEP] * 2, partial=[], activity={"data_wait": 20, "productive": 2 * 57, "outside": 18}),
    loop("one that is used after the loop has left its pass is of the step",
         times(2, lambda t: t.step().ask(iterator=1).dispose("code", 1).forward().backward().update()),
         durations=[STEP] * 4, partial=[]),
    loop("a group of batches that is left with a batch in hand is unfinished, without that batch",
         Tape().step().micro().ask(iterator=1).dispose("code", 1), durations=[STEP], partial=[MICRO],
         activity={"data_wait": 15, "productive": 57 + 50}),
    loop("a forward of the pass that trains is of its step",
         Tape().ask().forward().step().stop(), durations=[25 + STEP], evals=[]),
    loop("the forward of an encoder is of the step of its head",
         Tape().forward(8, "encoder").ask().forward().backward().update().stop(), durations=[8 + STEP], evals=[]),
    # Saving is neither this step nor the next.
    loop("a checkpoint after an update closes the step",
         times(2, lambda t: t.step().run(CHECKPOINT, "checkpoint", 100)).stop(), durations=[STEP] * 2,
         activity={"data_wait": 15, "productive": 114, "checkpoint": 200}, calls={"checkpoint": [(100, 0)] * 2},
         phase={"train": 129, "": 200}),
    loop("a checkpoint before an update suspends the step",
         Tape().step().micro().run(CHECKPOINT, "checkpoint", 100).update().stop(),
         durations=[STEP, STEP], spans=[STEP, STEP + 100]),
    loop("time after a checkpoint is of the next step if the pass goes on, and of none if an evaluation follows",
         Tape().step().run(CHECKPOINT, "checkpoint", 100).spend(9).validate(1).step().run(CHECKPOINT, "checkpoint", 100)
         .spend(4).step().stop(), durations=[STEP, STEP, 4 + STEP],
         activity={"data_wait": 20, "productive": 171 + 4, "eval": 16 + 5, "checkpoint": 200, "outside": 9}),
    # It waits for data, and there is none.
    loop("the ask that finds the end closes the step and is of none",
         Tape().step().stop().step().stop(), durations=[STEP, STEP], endings=[0, 0],
         activity={"data_wait": 20, "productive": 2 * 57}, count={"code": 2, "model": 2, "backward": 2, "SGD": 2}),
    loop("a batch that is passed over belongs to the step that follows",
         Tape().step().ask().ask().forward().backward().update().stop(),
         durations=[STEP, 5 + STEP], batches={"code": [("train", -1)] * 3}),
    # A dataset that raises, and a loop that goes on.
    loop("a failed ask is no batch",
         Tape().step().ask(op=Op.FAIL).step().stop(), durations=[STEP, STEP], failed_asks=1,
         count={"code": 2, "model": 2, "backward": 2, "SGD": 2}),
    # A wrapper that yields from a DataLoader, both instrumented.
    loop("a loader read inside a loader is data of the outer one and a batch of its own",
         times(2, lambda t: t.begin(DATA, "outer").spend(1).ask("inner", 4, samples=3).spend(1).end(DATA, "outer")
               .forward().backward().update()).stop("outer"),
         durations=[6 + 57] * 2, count={"outer": 2, "model": 2, "backward": 2, "SGD": 2},
         owner={"outer": 12 + 5, "model": 40, "backward": 60, "SGD": 14},
         batches={"outer": [("train", -1)] * 2, "inner": [("", 3)] * 2}),
    # Activation checkpointing runs the forward again.
    loop("a forward inside backward stays in backward",
         Tape().ask().forward().begin(BACKWARD, "backward").spend(10).forward(15).backward(5).spend(10)
         .end(BACKWARD, "backward").update(),
         durations=[5 + 20 + 40 + 7], count={"code": 1, "model": 1, "backward": 1, "SGD": 1},
         owner={"code": 5, "model": 20, "backward": 40, "SGD": 7}),
    loop("a forward inside a forward is one call",
         Tape().ask().begin(FORWARD, "model", flags=3).spend(5).forward(10, "encoder").spend(5).end(FORWARD, "model")
         .backward().update(),
         count={"code": 1, "model": 1, "backward": 1, "SGD": 1},
         owner={"code": 5, "model": 20, "backward": 30, "SGD": 7}),
    # A backward in forward, as in meta-learning.
    loop("autograd inside a forward is cut out of it",
         Tape().ask().begin(FORWARD, "model", flags=3).spend(5).backward(10).spend(5).end(FORWARD, "model")
         .backward().update(),
         owner={"code": 5, "model": 10, "backward": 40, "SGD": 7}, calls={"model": [(20, 0)]}),
    # A gradient penalty is part of the forward's loss.
    loop("autograd.grad stays where it runs once there is a backward",
         Tape().micro().begin(STAGE, "penalty").spend(1).run(SourceKind.GRAD, "grad", 8).spend(1)
         .end(STAGE, "penalty").update(),
         owner={"code": 5, "model": 20, "backward": 30, "penalty": 10, "SGD": 7},
         count={"code": 1, "model": 1, "backward": 1, "penalty": 1, "SGD": 1}),
    loop("autograd.grad is the backward of a run without another",
         times(2, lambda t: t.ask().forward().run(SourceKind.GRAD, "grad", 30).update()),
         count={"code": 2, "model": 2, "grad": 2, "SGD": 2}, durations=[STEP] * 2),
    # An optimizer that torch does not know of.
    loop("backwards are the steps of a pass without an update",
         times(3, lambda t: t.micro().spend(7)).stop(), durations=[MICRO + 7] * 3, partial=[]),
    loop("a block of a name inside one of the same name is a part of it, also inside another block",
         Tape().ask().begin(STAGE, "fit").begin(STAGE, "tune").spend(1).inside(STAGE, "tune", self_ns=2).spend(3).end(STAGE, "tune")
         .spend(4).forward().backward().update().end(STAGE, "fit"),
         owner={"code": 5, "tune": 6, "fit": 4, "model": 20, "backward": 30, "SGD": 7}, calls={"tune": [(6, 0)], "fit": [(67, 0)]}),
    # A pass may never end.
    loop("backwards are the steps after 300 without an update",
         times(310, Tape.micro), durations=[MICRO] * 310),
    # Training by other means, with the model in training mode.
    loop("a checkpoint ends no step where batches are the steps, and the last one ends with the session",
         times(3, lambda t: t.ask().forward().run(CHECKPOINT, "checkpoint", 40).spend(2)),
         durations=[27] * 3, partial=[], phase={"train": 81, "": 120}),
    loop("batches are the steps where there is no backward",
         times(3, lambda t: t.ask().forward()).stop(), durations=[25] * 3),
    # ``step()`` overrules everything else.
    loop("manual marks are the steps",
         times(2, lambda t: t.step().step().spend(1).mark()).stop(), durations=[2 * STEP + 1] * 2),
    # A loop without loader, optimizer or model is still a loop.
    loop("marks alone make as many steps as there are marks",
         times(3, lambda t: t.run(STAGE, "work", 5).mark()), durations=[5, 5, 5]),
    # accelerate looks one batch ahead: the last update and its mark follow the end of the pass.
    loop("a pause between epochs is of no marked step, also where the last batch is used after the end of its pass",
         Tape().repeat(3, lambda t: t.ask().ask().forward().backward().update().mark().stop().forward().backward().update()
                       .mark().run(CHECKPOINT, "checkpoint", 40).spend(100)),
         durations=[5 + STEP, STEP - 5] * 3,
         activity={"data_wait": 45, "productive": 6 * 57, "checkpoint": 120, "outside": 300}),
    loop("nor is one after an evaluation by next(iter(loader)), or between two epochs that are said",
         Tape().repeat(3, lambda t: t.epoch(1).ask().ask().forward().backward().update().mark().stop().forward().backward()
                       .update().mark().epoch_over().spend(50).epoch(2).ask("val").dispose("val").forward(11, flags=0)
                       .run(CHECKPOINT, "checkpoint", 40).spend(100)),
         durations=[5 + STEP, STEP - 5] * 3, evals=[16] * 3,
         activity={"data_wait": 45, "productive": 6 * 57, "eval": 48, "checkpoint": 120, "outside": 450}),
    # ``step(start=100)`` after a resume.
    loop("a number set manually is that of the open step",
         Tape().mark(100).step().step().stop(), durations=[STEP] * 2, numbers=[100, -1]),
    # The forwards carry the phase.
    loop("a forward that evaluates a trained model without a loader is an eval step",
         times(2, lambda t: t.forward().backward().update()).forward(11, flags=0).forward().backward().update(),
         durations=[57] * 3, evals=[11]),
    # TorchRL: the actor plays by itself, and is trained inside a module that computes the loss.
    loop("a forward without gradients of a model that is trained inside another one is an eval step",
         times(2, lambda t: t.forward(11, "actor", flags=0).begin(FORWARD, "loss", flags=TRAINING).forward(5, "actor")
               .end(FORWARD, "loss").backward().update()),
         evals=[11, 11], count={"actor": 2, "loss": 2, "backward": 2, "SGD": 2}),
    loop("a teacher inside the module that computes the loss is no eval step before it",
         times(2, lambda t: t.forward(11, "teacher", flags=0).begin(FORWARD, "loss", flags=TRAINING).forward(5, "teacher", flags=0)
               .end(FORWARD, "loss").backward().update()),
         evals=[], durations=[11 + 5 + 37] * 2),
    # Distillation: the teacher is never trained.
    loop("a teacher without grad in a loop without a loader is no eval step",
         times(2, lambda t: t.forward(11, "teacher", flags=0).forward().backward().update()),
         durations=[68] * 2, evals=[]),
    # The loader of training is evaluated after an epoch, then asked one batch ahead.
    loop("a batch that was fetched ahead is for what its pass trains, whatever its loader was evaluated for before",
         Tape().step().stop().ask(iterator=1).forward(11, flags=0).dispose("code", 1).ask(iterator=2).ask(iterator=2)
         .forward().backward().update().stop(iterator=2).forward().backward().update(),
         durations=[STEP, 5 + STEP, STEP - 5], evals=[16]),
    # ``next(iter(loader))`` in every step, and augmentation before the forward.
    loop("the loop's own work on a batch of a new iterator is of its step",
         Tape().repeat(3, lambda t: t.start().ask().dispose("code").spend(9).forward().backward().update()),
         durations=[3 + STEP, 3 + STEP + 9, 3 + STEP + 9],
         activity={"data_wait": 24, "productive": 3 * 57 + 18, "outside": 9}),
    loop("a batch of a new iterator that is not used is of the next step",
         Tape().repeat(3, lambda t: t.step().dispose("code")).ask().dispose("code").spend(9).step().dispose("code").spend(4),
         durations=[STEP, STEP, STEP, 5 + 9 + STEP], activity={"data_wait": 25, "productive": 4 * 57 + 9, "outside": 4}),
    loop("the loop's own work on the last batch of a loop that looks ahead is of its step",
         Tape().ask().repeat(3, lambda t: t.ask().spend(9).forward().backward().update()).stop().spend(9)
         .forward().backward().update().spend(4),
         durations=[5 + STEP + 9, STEP + 9, STEP + 9, 9 + STEP - 5],
         activity={"data_wait": 25, "productive": 4 * 66, "outside": 4}),
    # ``next(iter(loader))`` in every step: the batch is in hand although its iterator is gone.
    loop("what a generator makes for its critic, of a batch of a new iterator, is of the step",
         times(3, lambda t: t.ask().dispose("code").repeat(2, lambda u: u.forward(11, "G", flags=0).forward(20, "D").backward()
         .update(7, "D")).forward(20, "G").backward().update(7, "G")),
         durations=[5 + 68, 68 + 57] * 3, evals=[]),
    # A loss that is not finite, on the last batch.
    loop("a step given up on the last batch of a loop that looks ahead is training",
         Tape().ask(iterator=1).repeat(2, lambda t: t.ask(iterator=1).forward().backward().update()).stop(iterator=1)
         .forward().dispose("code", 1).spend(4),
         durations=[5 + STEP, STEP], evals=[], partial=[20]),
    loop("a batch of a new iterator at which the model raises is for what the loader trains, whatever it was evaluated for",
         Tape().step().stop().ask().forward(11, flags=0).stop()
         .repeat(2, lambda t: t.ask().dispose("code").forward().backward().update()).ask().dispose("code")
         .run(FORWARD, "model", 20, flags=3, end=Op.FAIL).step(),
         durations=[STEP, STEP, STEP, 25 + STEP], evals=[16]),
    # A remainder of two batches; the loop saves after its evaluation.
    loop("a pause after an evaluation without a loader is not of a step that the pass before it left open",
         Tape().micro().micro().update().micro().stop().forward(11, flags=0).spend(9).micro().update().stop(),
         durations=[2 * MICRO + 7, 2 * MICRO + 7], evals=[11],
         activity={"data_wait": 30, "productive": 4 * 50 + 14, "eval": 11, "outside": 9}),
    # Ultralytics evaluates a copy of the model; the model that was given runs in no batch of that pass.
    loop("a last pass of one batch in which no model runs is of no step, as one of several batches",
         times(2, Tape.step).stop().ask("held", 3).spend(100).stop("held").spend(7),
         durations=[STEP] * 2, partial=[], activity={"data_wait": 20, "productive": 114, "outside": 110}),
    # accelerate looks ahead; diffusers samples images after the epoch.
    loop("evaluation without a loader after the last batch of a loop that looks ahead has its steps",
         Tape().ask().repeat(2, lambda t: t.ask().forward().backward().update()).stop().forward().backward().update()
         .spend(4).repeat(2, lambda t: t.forward(11, flags=0)).spend(4),
         durations=[5 + STEP, STEP, STEP - 5], evals=[11, 11],
         activity={"data_wait": 20, "productive": 171, "eval": 22, "outside": 8}),
    # accelerate looks ahead in evaluations too.
    loop("each step of an evaluation that looks one batch ahead has the forward on its batch",
         Tape().step().stop().repeat(2, lambda t: t.ask("val").repeat(2, lambda u: u.ask("val").forward(11, flags=0))
         .stop("val").forward(11, flags=0).spend(9)),
         durations=[STEP], evals=[5 + 5 + 11, 5 + 11, 11] * 2,
         activity={"data_wait": 5 + 5, "productive": 57, "eval": 2 * (5 * 4 + 33), "outside": 18}),
    loop("so it has where its phase is declared, and two passes are left with a batch in hand",
         Tape().step().stop().repeat(2, lambda t: t.ask("held out", phase="eval").repeat(2, lambda u: u.ask("held out", phase="eval")
         .forward(11, flags=0)).dispose("held out", phase="eval")).step(),
         durations=[STEP] * 2, evals=[5 + 5 + 11, 5 + 11] * 2,
         phase={"train": 2 * STEP + 5, "eval": 2 * (15 + 22)}),
    loop("batches of a declared phase in which no model runs are steps",
         Tape().step().stop().repeat(4, lambda t: t.ask("held out", phase="eval").spend(7)).stop("held out", phase="eval"),
         evals=[5 + 7] * 4, phase={"train": STEP + 5, "eval": 4 * 12 + 5}),
    loop("a loader that is declared to train trains, whatever its name and its forwards say",
         times(2, lambda t: t.repeat(2, lambda u: u.ask("val", phase="train").forward(11, flags=0)).stop("val", phase="train").step()),
         durations=[2 * (5 + 11) + STEP] * 2, evals=[], phase={"train": 2 * (2 * 16 + 5 + STEP)}),
    loop("so it does where it is asked while a batch is in hand, or before an update",
         times(2, lambda t: t.ask().ask("val", phase="train").forward(11, flags=0).forward().backward()
               .ask("val", phase="train").forward(11, flags=0).update()).stop(),
         durations=[STEP + 2 * (5 + 11)] * 2, evals=[]),
    # A model in evaluation mode trains, too: frozen statistics of batches. Gradients without an update are an attack where a name says so.
    loop("accumulation in evaluation mode is training",
         times(2, lambda t: t.repeat(2, lambda u: u.ask().forward(flags=Flag.GRAD).backward()).update()).stop(),
         durations=[2 * MICRO + 7] * 2, evals=[]),
    loop("so it is in a pass over a loader whose name says evaluation, once it has trained",
         times(2, lambda t: t.ask("val").forward(flags=Flag.GRAD).backward().update()
               .repeat(2, lambda u: u.ask("val").forward(flags=Flag.GRAD).backward()).update()).stop("val"),
         durations=[STEP, 2 * MICRO + 7] * 2, evals=[]),
    loop("gradients in evaluation mode in batches of a loader whose name says evaluation are an attack",
         times(2, lambda t: t.step().stop().repeat(2, lambda u: u.ask("val").forward(flags=Flag.GRAD).backward()).stop("val")),
         durations=[STEP] * 2, evals=[MICRO] * 4),
    loop("so they are where the loop looks one batch ahead",
         times(2, Tape.step).stop().ask("val").repeat(3, lambda t: t.ask("val").forward(flags=Flag.GRAD).backward()).stop("val")
         .forward(flags=Flag.GRAD).backward(), durations=[STEP] * 2, partial=[], phase={"train": 2 * STEP + 5, "eval": 4 * MICRO + 5}),
    loop("zipped with a training loader they are not",
         times(2, lambda t: t.repeat(2, lambda u: u.ask("val").ask().forward(flags=Flag.GRAD).backward()).update())
         .stop("val").stop(), durations=[2 * (5 + MICRO) + 7] * 2, evals=[]),
    # Elastic weight consolidation, influence functions, saliency: gradients of the training rows, which no optimizer uses.
    loop("gradients in evaluation mode over a pass without an update are an evaluation",
         times(2, lambda t: t.repeat(2, Tape.step).stop().repeat(3, lambda u: u.ask().forward(flags=Flag.GRAD).backward()).stop().spend(9)),
         durations=[STEP] * 4, evals=[MICRO] * 6, partial=[], activity={"productive": 228, "data_wait": 40, "eval": 6 * MICRO, "outside": 18}),
    loop("so they are before anything has trained, over a loader whose name says training, and where the pass is left",
         Tape().repeat(3, lambda t: t.ask("train", iterator=1).forward(flags=Flag.GRAD).backward()).dispose("train", 1)
         .repeat(2, lambda t: t.step("train")).stop("train"), durations=[STEP] * 2, evals=[MICRO] * 3, partial=[]),
    loop("so they are at the end of the session, and in the pass of a single batch",
         times(2, Tape.step).stop().ask("rows").forward(flags=Flag.GRAD).backward(), durations=[STEP] * 2, evals=[MICRO], partial=[]),
    loop("they wait for an update up to 64 batches long",
         times(2, lambda t: t.repeat(64, lambda u: u.ask().forward(flags=Flag.GRAD).backward()).update(9)).stop()
         .repeat(66, lambda u: u.ask().forward(flags=Flag.GRAD).backward()).update(9).ask().stop(),
         durations=[64 * MICRO + 9] * 2 + [MICRO + 9], evals=[MICRO] * 65),
    loop("an update after the pass uses them, if no batch is asked before",
         times(2, lambda t: t.repeat(2, lambda u: u.ask().forward(flags=Flag.GRAD).backward()).stop().update()),
         durations=[2 * MICRO + 7 ] * 2, evals=[]),
    loop("a model that requests its batch inside its forward has used the last one when the pass is left",
         times(2, Tape.step).stop()
         .repeat(3, lambda t: t.begin(FORWARD, "model", flags=0).ask("val", iterator=3).spend(4).end(FORWARD, "model"))
         .dispose("val", 3).spend(30).step(), durations=[STEP] * 3, evals=[9] * 3, activity={"outside": 30, "eval": 27, "productive": 171, "data_wait": 20}),
    # nanochat fetches the next batch before the update, and evaluates some batches at the top of the loop.
    loop("an evaluation of several batches between the fetch of a batch and its step is none of the step, although its iterator stays",
         Tape().ask().repeat(3, lambda t: t.ask("val").forward(11, flags=0).ask("val").forward(11, flags=0).spend(3)
         .forward().backward().ask().update()),
         durations=[5 + 3 + 50 + 5 + 7] + [3 + 50 + 5 + 7] * 2, evals=[5 + 11] * 6),
    loop("so is one of a loader whose name says nothing, once its iterator has shown an evaluation",
         Tape().ask().repeat(3, lambda t: t.repeat(2, lambda u: u.ask("held out").forward(11, flags=0)).spend(3)
         .forward().backward().ask().update()), evals=[5 + 11] * 6),
    # ``if step % n == 0: evaluate()`` at the top of the loop, which reads one batch, or leaves its pass with one in hand.
    loop("a batch that is in hand where an evaluation is left while one to train on is in hand is no step, and is not trained on",
         times(3, lambda t: t.ask().ask("val", iterator=1).forward(11, flags=0).ask("val", iterator=1).dispose("val", 1)
         .forward().backward().update()), durations=[STEP] * 3, evals=[5 + 11] * 3,
         phase={"train": 3 * STEP, "eval": 3 * (5 + 11 + 5)}),
    loop("so it is where a further batch to train on is requested before the backward",
         Tape().ask().repeat(3, lambda t: t.ask("val", iterator=1).forward(11, flags=0).ask("val", iterator=1).dispose("val", 1)
         .forward().ask().backward().update()), durations=[5 + STEP, STEP, STEP], evals=[5 + 11] * 3,
         phase={"train": 5 + 3 * STEP, "eval": 3 * (5 + 11 + 5)}),
    loop("the wait for the batch in hand is of its step where an evaluation reads a single batch",
         times(3, lambda t: t.ask().ask("val", iterator=1).forward(11, flags=0).dispose("val", 1).forward().backward().update()),
         durations=[STEP] * 3, evals=[5 + 11] * 3, labels={"train": "code", "eval": "val"}),
    loop("a forward that follows such an evaluation trains, also where the pass of its batch ends before its backward",
         Tape().ask().forward().ask().backward().update().ask("val").forward(11, flags=0).stop("val")
         .forward().stop().ask().backward().update().forward().backward().update(), evals=[5 + 11],
         phase={"train": 3 * STEP + 5, "eval": 5 + 11 + 5}),
    loop("in a batch of such a loader that trains, forwards without gradients are a teacher's where no other batch is in hand",
         times(3, lambda t: t.ask("val").forward(11, flags=0).forward().backward().update()).stop("val"),
         durations=[STEP + 11] * 3, evals=[]),
    # A forward without gradients that no update follows is no step.
    loop("batches of two loaders whose iterators are gone before they are used are one batch",
         Tape().step().stop().ask("val", 5, iterator=1).ask("images", 6, iterator=2).dispose("val", 1)
         .dispose("images", 2).forward(11, flags=0).spend(3), durations=[STEP], evals=[5 + 6 + 11],
         activity={"data_wait": 10, "productive": 57, "eval": 5 + 6 + 11, "outside": 3}),
    # ``if i >= 2: break`` at the head of the loop: the third batch has been fetched.
    loop("a batch that is in hand where the loop leaves an evaluation is no step",
         Tape().step().stop().repeat(2, lambda t: t.ask("val", iterator=1).forward(11, flags=0)).ask("val", iterator=1)
         .dispose("val", 1).spend(3).step().stop(), durations=[STEP] * 2, evals=[16, 16],
         activity={"data_wait": 20, "productive": 114, "eval": 2 * 16 + 5, "outside": 3}),
    # A loader with persistent workers keeps its iterator.
    loop("a batch that is in hand where the loop leaves an evaluation whose iterator stays is no step",
         Tape().step().stop().repeat(2, lambda t: t.ask("val", iterator=1).forward(11, flags=0)).ask("val", iterator=1)
         .spend(3).step().stop(), durations=[STEP] * 2, evals=[16, 16],
         activity={"data_wait": 20, "productive": 114, "eval": 2 * 16 + 5 + 3}),
    loop("a batch that is used after the loop has left the evaluation is a step",
         Tape().step().stop().repeat(2, lambda t: t.ask("val", iterator=1).forward(11, flags=0)).ask("val", iterator=1)
         .dispose("val", 1).forward(11, flags=0).step().stop(), durations=[STEP] * 2, evals=[16, 16, 5],
         activity={"data_wait": 20, "productive": 114, "eval": 3 * 16}),
    loop("a batch of an evaluation whose iterator is gone is a step with its forward, and what follows a checkpoint after it is of none",
         Tape().repeat(3, lambda t: t.repeat(2, Tape.step).ask("code").dispose("code")
                       .ask("val").dispose("val").forward(11, flags=0).run(CHECKPOINT, "checkpoint", 40).spend(100)),
         durations=[STEP] * 6, evals=[16] * 3, partial=[],
         activity={"data_wait": 45, "productive": 6 * 57, "eval": 48, "checkpoint": 120, "outside": 300}),
    loop("the end of a loader that showed an evaluation, of one batch that is used after it, is a wait of the evaluation",
         Tape().repeat(3, lambda t: t.step().stop().ask("b").stop("b").dispose("b").forward(11, flags=0)),
         durations=[STEP] * 3, evals=[16] * 3,
         activity={"data_wait": 3 * 10 + 5, "productive": 3 * 57, "eval": 48 + 10}),
    loop("sampling after the last pass is evaluation",
         Tape().step().stop().spend(3).forward(50, flags=0).spend(4), durations=[STEP], evals=[50],
         activity={"data_wait": 10, "productive": 57, "eval": 50, "outside": 7}),
    # ``with stage("fit")`` owns the time that is in no other stage.
    loop("a stage around the whole loop leaves the steps alone",
         Tape().begin(STAGE, "fit").spend(3).repeat(2, lambda t: t.step().spend(3)).stop().end(STAGE, "fit"),
         durations=[STEP + 3] * 2, owner={"code": 15, "model": 40, "backward": 60, "SGD": 14, "fit": 9},
         calls={"fit": [(3 + 2 * 65 + 5, 0)]}),
    # Across ``await`` others run.
    loop("a stage that is suspended counts only while it runs",
         Tape().ask().piece("augment", 4, Op.SUSPEND, 1).forward().piece("augment", 6, Op.END, 1)
         .backward().update().stop(),
         calls={"augment": [(10, 0)]}, durations=[STEP + 10]),
    # ``with stage("a"): await ...`` in two tasks: each block ends by itself, and none has failed.
    loop("stages of two coroutines that take turns end each by itself",
         Tape().ask().begin(STAGE, "a").spend(3).begin(STAGE, "b").spend(4).end(STAGE, "a").spend(6).end(STAGE, "b")
         .forward().backward().update(),
         calls={"a": [(7, 0)], "b": [(10, 0)]}, durations=[STEP + 13],
         owner={"code": 5, "a": 3, "b": 10, "model": 20, "backward": 30, "SGD": 7},
         inclusive={"code": 5, "a": 7, "b": 10, "model": 20, "backward": 30, "SGD": 7}),
    loop("of three the one between may end first, and one may fail",
         Tape().ask().begin(STAGE, "a").spend(1).begin(STAGE, "b").spend(2).begin(STAGE, "c").spend(3).end(STAGE, "b").spend(4)
         .end(STAGE, "a", op=Op.FAIL).spend(5).end(STAGE, "c").forward().backward().update(),
         calls={"b": [(5, 0)], "a": [(10, 1)], "c": [(12, 0)]}, durations=[STEP + 15], failed=[1],
         inclusive={"code": 5, "a": 10, "b": 5, "c": 12, "model": 20, "backward": 30, "SGD": 7}),
    loop("a block inside a coroutine goes on while that is suspended",
         Tape().ask().at("play", Op.RESUME, 1).spend(2).begin(STAGE, "net").spend(3).at("play", Op.SUSPEND, 1).spend(4)
         .at("play", Op.RESUME, 1).spend(5).end(STAGE, "net").spend(6).at("play", Op.END, 1).forward().backward().update(),
         calls={"play": [(2 + 3 + 5 + 6, 0)], "net": [(3 + 4 + 5, 0)]}, durations=[STEP + 20], failed=[0]),
    # A hundred environments that are played at once, and a model that learns meanwhile.
    loop("blocks of one name that overlap are one call, and hide nothing, however many they are",
         Tape().repeat(100, lambda t: t.begin(STAGE, "play").spend(1)).step().end(STAGE, "play").step()
         .repeat(99, lambda t: t.end(STAGE, "play")).spend(4).step(),
         calls={"play": [(100 + STEP + STEP, 0)]}, durations=[STEP, STEP + 4, STEP], updates=(3, 0),
         count={"play": 1, "code": 3, "model": 3, "backward": 3, "SGD": 3}),
    # A dataset in the training process: ``with stage("read"): yield sample``.
    loop("a block around the yield of a dataset ends with the request",
         times(2, lambda t: t.begin(DATA, "code").end(STAGE, "read").begin(STAGE, "read").spend(4).end(DATA, "code")
               .forward().backward().update()),
         calls={"read": [(4, 0), (4, 0)]}, durations=[4 + 57] * 2, failed=[0, 0]),
    # The first steps of mixed precision overflow.
    loop("a scaler that skips makes no update",
         Tape().micro().run(SCALER, "GradScaler", 2).micro().begin(SCALER, "GradScaler").spend(1).update().spend(1)
         .end(SCALER, "GradScaler").stop(),
         updates=(1, 1), durations=[MICRO + 2 + MICRO + 9],
         count={"code": 2, "model": 2, "backward": 2, "GradScaler": 2}),
    # A forward whose end was lost must not swallow the rest of the run.
    loop("what an exception left open is unwound by the outer edge",
         Tape().begin(STAGE, "try").begin(FORWARD, "model", flags=3).spend(4).end(STAGE, "try", op=Op.FAIL)
         .step().stop(),
         calls={"model": [(4, 1), (20, 0)]}, updates=(1, 0)),
    # K-fold loops validate on the same loader.
    loop("training in two phases of one loader is distinguished by what is done",
         Tape().step().stop().ask().forward(11, flags=0).ask().forward(11, flags=0).stop().step().stop(),
         durations=[STEP, STEP], evals=[16, 16]),
    # Starting the workers of a validation loader must not read as training that waits.
    loop("making an iterator belongs to the batches it will give",
         Tape().step().stop().start("val", 1000).ask("val").forward(flags=0).stop("val").step(),
         count={"code": 2, "model": 3, "backward": 2, "SGD": 2, "val": 1}, evals=[1000 + 5 + 20],
         activity={"data_wait": 15, "productive": 114, "eval": 1000 + 5 + 20 + 5}),
    # JAX compiles forward, backward and update into one call: there is nothing else to count.
    loop("a function that makes a whole update is a step",
         times(3, lambda t: t.ask().run(WHOLE, "make_step", 50)).stop(), durations=[55] * 3, updates=(3, 0),
         owner={"code": 20, "make_step": 150}, activity={"data_wait": 20, "productive": 150}, phase={"train": 170}),
    # A step that is not compiled as a whole may have its parts timed as well.
    loop("an update inside a whole update is none",
         times(2, lambda t: t.ask().begin(WHOLE, "make_step").run(STAGE, "loss", 30).update().spend(3)
               .end(WHOLE, "make_step")).stop(),
         durations=[45] * 2, updates=(2, 0), owner={"code": 15, "loss": 60, "SGD": 14, "make_step": 6}),
    loop("two whole updates in turn are one step",
         times(2, lambda t: t.ask().run(WHOLE, "generator", 20).run(WHOLE, "critic", 30)).stop(),
         durations=[55] * 2, updates=(4, 0)),
    # Nothing was updated; the program goes on with the next batch.
    loop("a whole update that fails makes no step",
         Tape().ask().run(WHOLE, "make_step", 20, end=Op.FAIL).ask().run(WHOLE, "make_step", 20).stop(),
         durations=[50], updates=(1, 0)),
    # A loss of the outputs of a whole pass, as of a survival model. The iterator is gone before the backward comes.
    loop("a backward right after a pass is of its forwards",
         times(2, lambda t: t.ask().forward().ask().forward().stop().dispose("code").spend(2).backward().update()),
         durations=[50 + 37] * 2, evals=[], labels={"train": "code"}, activity={"data_wait": 30, "productive": 154, "outside": 4}),
    # The instances of a bag by a loader, then a head on their features.
    loop("so it is where another model with gradients runs before it",
         times(2, lambda t: t.ask().forward(20, "encoder").stop().dispose("code").forward(11, "head").backward().update()),
         durations=[25 + 48] * 2, evals=[]),
    # Gradients are on in the validation; what trains then is not its loss.
    loop("a backward after a pass and another forward is not of the pass",
         times(2, lambda t: t.forward().backward().update().ask("val").forward().stop("val").dispose("val")),
         durations=[57] * 2, evals=[25] * 2),
    loop("an update without a backward after a pass is not of the pass",
         Tape().step().micro().stop().ask("val").forward().stop("val").dispose("val").update(),
         durations=[STEP, MICRO + 7], evals=[25]),
    loop("a backward after a pass of a loader whose name says evaluation is not of the pass",
         times(2, lambda t: t.step().stop().ask("val").forward().stop("val").dispose("val").backward().update()),
         durations=[STEP, 37] * 2, evals=[25] * 2),
    loop("a backward after a pass inside a batch whose forward waits is of that forward",
         times(2, lambda t: t.ask(iterator=1).forward().ask("val", iterator=2).forward().dispose("val", 2).backward().update()),
         durations=[STEP] * 2, evals=[25] * 2),
    # Fine-tuning by two forwards per update, which the program makes itself (MeZO).
    loop("marked steps without gradients and updates train, but for loaders whose name says evaluation",
         times(2, lambda t: t.ask().forward(flags=0).forward(flags=0).ask().forward(flags=0).spend(4).mark()
               .ask("val").forward(flags=0)).stop("val"),
         durations=[5 + 40 + 5 + 24] * 2, evals=[25] * 2, partial=[], labels={"train": "code", "eval": "val"}),
    loop("so do those without a loader",
         times(3, lambda t: t.forward(flags=0).forward(flags=0).spend(4).mark()), durations=[44] * 3, evals=[]),
    loop("a pass without a mark evaluates",
         Tape().ask("held out").forward(flags=0).stop("held out")
         .repeat(2, lambda t: t.ask().forward(flags=0).mark()).stop().ask("held out").forward(flags=0).stop("held out"),
         durations=[25] * 2, evals=[25] * 2),
    # The queue of a prefetcher still has batches of the pass of training, which is over, when an evaluation has looked ahead.
    loop("training after an evaluation that looked ahead is not of its loader",
         Tape().step().stop().ask("b", iterator=1).ask("b", iterator=1).forward(flags=0).stop("b", iterator=1)
         .forward(flags=0).dispose("b", 1)
         .forward().backward().update(),
         durations=[STEP, 57], evals=[5 + 5 + 20, 20], labels={"train": "code", "eval": "b"}, partial=[]),
    # ``list(val)``, and the last group of ``itertools.batched(val, 2)``.
    loop("batches of an evaluation that are read before they are used are steps once, and the forwards are of their loader",
         Tape().step().stop().ask("val", iterator=1).ask("val", iterator=1).stop("val", iterator=1).dispose("val", 1)
         .spend(2).forward(flags=0).spend(3).forward(flags=0).spend(4).step(),
         durations=[STEP] * 2, evals=[5, 5], phase={"": 2 + 4, "train": 2 * STEP + 5, "eval": 15 + 20 + 3 + 20},
         labels={"train": "code", "eval": "val"}),
    loop("a batch of evaluation between a backward and its update is in no step",
         times(2, lambda t: t.micro().ask("val", iterator=1).forward(flags=0).spend(2).update()),
         durations=[STEP + 2] * 2, evals=[25] * 2, labels={"train": "code", "eval": "val"}),
    loop("they are so where training without a loader follows",
         Tape().step().stop().ask("val").ask("val").stop("val").forward(flags=0).forward(flags=0)
         .forward().backward().update().step(),
         durations=[STEP, 57, STEP], evals=[5, 5], labels={"train": "code", "eval": "val"}, phase={"train": 2 * STEP + 57 + 5, "eval": 15 + 40}),
    loop("they are so with gradients on, although the next step trains",
         Tape().step().stop().ask("val").ask("val").stop("val").forward().forward().step(),
         durations=[STEP] * 2, evals=[5, 5], phase={"train": 2 * STEP + 5, "eval": 15 + 40}, partial=[]),
    loop("so is the last of them where they are read in groups",
         Tape().step().stop().repeat(2, lambda t: t.ask("val", iterator=1).ask("val", iterator=1)
               .forward(flags=0).forward(flags=0)).ask("val", iterator=1).stop("val", iterator=1)
         .forward(flags=0).dispose("val", 1).step(),
         durations=[STEP] * 2, evals=[5, 45, 5, 45, 5], labels={"train": "code", "eval": "val"}),
    # The model that used them was not given.
    loop("training without a loader after an evaluation in which no model ran is not of its loader",
         Tape().ask("val").ask("val").stop("val").spend(9).repeat(2, lambda t: t.forward().backward().update()),
         durations=[57, 57], evals=[5, 5], labels={"train": "", "eval": "val"}),
    loop("a forward with gradients on a batch of a loader named val, after which another loader trains, evaluates",
         Tape().ask("val", iterator=1).forward().repeat(2, lambda t: t.step().ask("val", iterator=1).forward()),
         durations=[STEP] * 2, evals=[25] * 3, partial=[], labels={"train": "code", "eval": "val"}),
    loop("a batch of evaluation that is drawn inside a pass of training is over where that pass is left",
         times(2, lambda t: t.repeat(2, lambda u: u.ask(iterator=1).forward().backward().update())
               .ask("val", iterator=2).forward(11, flags=0).spend(1).dispose("code", 1).spend(100)),
         durations=[STEP] * 4, evals=[17] * 2, activity={"data_wait": 20, "productive": 228, "eval": 34, "outside": 200}),
    loop("the end of an older pass of training leaves it open",
         Tape().ask("old", iterator=1).forward().backward().update().step().ask("val", iterator=2).forward(11, flags=0)
         .dispose("old", 1).spend(100), durations=[STEP] * 2, evals=[116]),
    # ``if number % 10 == 0: evaluate()`` is the first line of the loop.
    loop("a batch that was in hand during an evaluation is accounted for as any other",
         times(4, lambda t: t.ask(iterator=1).validate(1).forward().backward().spend(2)
               .ask(iterator=1).forward().backward().spend(3).update().spend(4)).stop(iterator=1),
         durations=[2 * MICRO + 2 + 3 + 7 + 4] * 4, evals=[16] * 4, partial=[]),
    loop("so it is where a checkpoint follows",
         times(3, lambda t: t.ask(iterator=1).validate(1).forward().backward().update().run(CHECKPOINT, "checkpoint", 40)
               .spend(2)).stop(iterator=1).spend(9),
         durations=[STEP] + [STEP + 2] * 2, activity={"data_wait": 20, "productive": 3 * 57 + 2 * 2, "eval": 3 * 21,
                                                      "checkpoint": 120, "outside": 2 + 9}),
    loop("so it is where steps are marked",
         times(3, lambda t: t.ask(iterator=1).validate(1).forward().backward().update().mark().spend(2)).stop(iterator=1),
         durations=[STEP] + [STEP + 2] * 2, evals=[16] * 3),
    loop("so it is where its step is given up",
         times(3, lambda t: t.ask(iterator=1).validate(1).forward().spend(2).ask(iterator=1).forward().backward().update())
         .stop(iterator=1),
         durations=[5 + 22 + STEP] * 3, evals=[16] * 3),
    loop("so it is where two more loaders are asked between its forward and its backward",
         times(3, lambda t: t.ask(iterator=1).validate(1).forward().ask("b", iterator=2).forward().ask("c", iterator=3)
               .forward().backward().update()).stop(iterator=1),
         durations=[15 + 60 + 37] * 3, evals=[16] * 3),
    loop("so it is where hard examples are chosen first, and a second evaluation comes before the backward",
         times(2, lambda t: t.ask(iterator=1).validate(1).forward(flags=0).forward().run(CHECKPOINT, "checkpoint", 40)
               .validate(1).backward().update()),
         durations=[5 + 40 + 37] * 2, evals=[16] * 4),
    loop("so it is where the loop then leaves its pass",
         Tape().step().ask(iterator=1).validate(1).forward().backward().spend(2).dispose("code", 1).spend(50).step().stop(),
         durations=[STEP, MICRO + 2 + STEP], evals=[16], activity={"data_wait": 20, "productive": 57 * 2 + 52, "eval": 21, "outside": 50}),
    loop("a loop of marked steps that looks ahead trains on its first batch, although its loader was evaluated before",
         Tape().step().mark().ask(iterator=2).forward(11, flags=0).stop(iterator=2).ask(iterator=3).ask(iterator=3)
         .forward().backward().update().mark().stop(iterator=3).forward().backward().update().mark(),
         evals=[16], durations=[STEP, 5 + STEP, 57]),
    loop("forwards without a loader are steps of evaluation after a mark, too",
         times(3, lambda t: t.step().mark().spend(1).forward(11, flags=0).forward(12, flags=0)).stop(),
         durations=[STEP] * 3, evals=[11, 12] * 3, activity={"data_wait": 20, "productive": 3 * 57, "eval": 69, "outside": 3}),
    loop("they are so after a checkpoint",
         times(3, lambda t: t.step().run(CHECKPOINT, "checkpoint", 40).forward(11, flags=0).forward(12, flags=0)).stop(),
         durations=[STEP] * 3, evals=[11, 12] * 3, labels={"train": "code", "eval": ""}),
    # A batch is a step once, whether its phase was declared or found.
    loop("a checkpoint inside a declared batch makes no further step of it",
         Tape().step().ask("held out", phase="eval").forward(11, flags=0).run(CHECKPOINT, "checkpoint", 40).spend(2)
         .stop("held out", phase="eval"),
         evals=[16], phase={"train": STEP, "eval": 23, "": 40}),
])  # fmt: skip
def test_a_loop_is_accounted_for_as_by_head(tape: Tape, expected: dict[str, Any]) -> None:
    """Time does not vanish, and no event is counted twice or in the wrong step."""
    calls = expected.pop("calls", {})

    book = account_for(tape)

    assert {name: FOUND[name](book) for name in expected} == expected
    assert {name: [(c.inclusive_ns, c.failed) for c in book.calls(name)] for name in calls} == calls


def test_a_checkpoint_is_of_no_step_and_no_phase_and_a_batch_is_of_its_loader() -> None:
    """Occurrences carry where they belong."""
    book = account_for(Tape().step().run(CHECKPOINT, "checkpoint", 100).stop())

    assert [(call.step, call.phase) for call in book.calls("checkpoint")] == [(-1, "")]
    assert [call.loader for call in book.calls("code")] == ["code"]


@pytest.mark.parametrize(
    ("loader", "phase", "expected"),
    [("code", "", "train"), ("val", "", "train"), ("test_set", "", "train"), ("code", "predict", "predict")],
)
def test_an_update_in_the_batch_means_train_unless_it_is_declared(
    loader: str, phase: str, expected: str
) -> None:
    """A name is weaker evidence than an update, a declaration is stronger than both."""
    tape = Tape().ask(loader, phase=phase).forward().backward().update().stop(loader, phase=phase)

    assert {phase for batches in account_for(tape).batches().values() for phase, _ in batches} == {expected}


@pytest.mark.parametrize(
    ("loader", "flags", "expected"),
    [
        ("valid", Flag.GRAD | Flag.TRAINING, "eval"),
        ("predictions", 0, "predict"),
        ("Test", 0, "test"),
        ("code", 0, "eval"),
        ("code", Flag.TRAINING, "eval"),
        ("code", Flag.GRAD, "eval"),
        ("code", Flag.GRAD | Flag.TRAINING, "train"),
    ],
)
def test_without_an_update_the_name_says_then_the_forward(loader: str, flags: int, expected: str) -> None:
    """The order of evidence of docs/reference/step-boundaries.md."""
    tape = Tape().ask(loader).forward(flags=flags).stop(loader)

    assert account_for(tape).batches()[loader] == [(expected, -1)]


@pytest.mark.parametrize("cuts", [(), range(1, 60)], ids=["in one slice", "edge by edge"])
def test_a_loader_that_is_new_is_for_what_its_first_used_batch_is_for(cuts: tuple[int, ...]) -> None:
    """Trainers fetch a batch ahead: the first ask shows nothing before the second, and is no training for that."""
    tape = times(3, Tape.step).stop().ask("fresh").repeat(2, lambda t: t.ask("fresh").forward(flags=0))

    book = account_for(tape.stop("fresh").forward(flags=0), cuts)

    assert len(book.durations()) == 3
    assert len(book.steps("eval")) == 3
    assert [phase for phase, _ in book.batches()["fresh"]] == ["eval"] * 3


# --- user stages around batches -------------------------------------------------------------------


def row_of(tape: Tape, stage: str) -> dict[str, object]:
    """Where the calls of a user stage stand, and where the time stands in which it was open."""
    book = account_for(tape, range(0, len(tape.times), 5))
    times = [row for row in book.times() if row.source >= 0 and book.name(row.source) == stage]
    open_ns: dict[tuple[str, str], int] = {}
    for row in times:
        where = phase_name(row.phase), book.name(row.loader)
        open_ns[where] = open_ns.get(where, 0) + row.inclusive_ns
    return {
        "calls": [(call.phase, call.loader, call.inclusive_ns) for call in book.calls(stage)],
        "open": {where: ns for where, ns in open_ns.items() if ns},
    }


def around(tape: Tape, stage: str, inside: Callable[[Tape], object], *, op: Op = Op.END) -> Tape:
    """A user stage that begins 2 before what is inside and ends 4 after it."""
    tape.begin(SourceKind.STAGE, stage).spend(2)
    inside(tape)
    return tape.spend(4).end(SourceKind.STAGE, stage, op=op)


def trained() -> Tape:
    """Two steps and the end of their loader."""
    return Tape().step().step().stop().spend(3)


def in_one_row(sentence: str, tape: Tape, phase: dict[str, int] | None = None, **rows: Any) -> Any:
    """A row: phase, loader and lengths of the calls of each user stage; ``phase``: self time of all by phase, if said."""
    return pytest.param(tape, rows, phase, id=sentence)


@pytest.mark.parametrize(("tape", "rows", "phase"), [
    # It begins before the first batch tells the phase, and ends after the last.
    *(in_one_row(f"a stage around an evaluation is of the phase of its batches: {op.name}",
                 around(trained(), "evaluate", Tape.validate, op=op).spend(1).step().stop(),
                 {"": 3 + 2 + 4 + 1, "train": 196, "eval": 37}, evaluate=("eval", "val", [43])) for op in (Op.END, Op.FAIL)),
    # A call is in one row, however many phases it spans; each instant stays in the phase that it is in.
    in_one_row("a stage around an epoch is of the phase of its first batch",
               around(Tape(), "epoch", lambda t: t.step().step().stop().validate()),
               {"": 2 + 4, "train": 129, "eval": 37}, epoch=("train", "code", [172])),
    # Such as logging between two passes, with a stage inside it.
    in_one_row("a stage without a batch is of no phase",
               around(trained(), "log", lambda t: t.inside(STAGE, "upload", self_ns=7)).step().stop(),
               log=("", "", [13]), upload=("", "", [7])),
    # ``fit`` around ``epoch`` around ``evaluate``.
    in_one_row("stages inside one another around batches are each in one row",
               around(Tape().step().step().stop(), "fit",
                      lambda t: around(t.step().stop(), "evaluate", lambda u: u.spend(1).validate())).step().stop(),
               fit=("train", "code", [117]), evaluate=("eval", "val", [44])),
    # A loop that opens a stage before its update and closes it in an evaluation.
    in_one_row("a stage that ends in the next batch is of the one in which it began",
               Tape().step().micro().begin(STAGE, "odd").spend(2).update().ask("val").spend(1).end(STAGE, "odd")
               .forward(11, flags=0).stop("val").step().stop(), odd=("train", "code", [15])),
    # A generator that works a little for every batch.
    in_one_row("the pieces of a stage in several batches are in one row",
               Tape().step().piece("stream", 4, Op.SUSPEND, 1).step().stop().ask("val").forward(11, flags=0)
               .piece("stream", 6, Op.SUSPEND, 1).stop("val").piece("stream", 5, Op.END, 1), stream=("train", "code", [15])),
    # A pass with gradients in training mode is known for an evaluation when it is over, after the stage has ended.
    in_one_row("a stage around batches that wait is of their phase",
               around(trained(), "measure", lambda t: t.ask("held out").forward(11).ask("held out").forward(11))
               .stop("held out").step().stop(), measure=("eval", "held out", [38])),
    # With manual steps the stage is part of the step before its loader is known.
    in_one_row("a stage around the ask of a step is of the loader that is asked",
               times(3, lambda t: around(t, "next", lambda u: u.ask()).forward().backward().update().mark()),
               next=("train", "code", [11] * 3)),
])  # fmt: skip
def test_the_calls_of_a_user_stage_are_in_one_row(
    tape: Tape, rows: dict[str, tuple[str, str, list[int]]], phase: dict[str, int] | None
) -> None:
    """Its time by phase and loader is that of its calls."""
    for stage, (of_phase, loader, lasted) in rows.items():
        assert row_of(tape, stage) == {
            "calls": [(of_phase, loader, ns) for ns in lasted], "open": {(of_phase, loader): sum(lasted)},
        }  # fmt: skip
    assert phase is None or account_for(tape).self_ns("phase") == phase


def test_a_stage_that_does_not_end_has_its_time_in_one_row() -> None:
    """The program is over inside it."""
    tape = trained().begin(SourceKind.STAGE, "evaluate").spend(2).validate().spend(4)

    assert row_of(tape, "evaluate") == {"calls": [], "open": {("eval", "val"): 43}}


def test_a_call_around_steps_is_of_none_of_them() -> None:
    """A sampled step shows what is in it."""
    book = account_for(around(Tape(), "epoch", lambda t: t.step().step().stop()))

    assert [call.step for call in book.calls("epoch")] == [-1]


def test_a_batch_that_is_fetched_inside_an_ask_of_another_loader_is_a_part_of_its_batch() -> None:
    """A dataset that iterates a loader: both give batches; the wait is one, and one is trained on."""
    tape = Tape()
    for _ in range(2):
        outer = tape.source(SourceKind.DATA, "outer")
        tape.edge(Op.BEGIN, outer)
        tape.spend(1).ask("inner", 6, samples=8).spend(2)
        tape.edge(Op.END, outer, payload=9)
        tape.forward().backward().update()

    book = account_for(tape.stop("outer"))

    assert book.batches() == {"inner": [("", 8)] * 2, "outer": [("train", 8)] * 2}
    assert [(step.loader, step.samples, step.duration_ns) for step in book.steps()] == [("outer", 8, 66)] * 2
    assert book.count()["outer"] == 2
    assert "inner" not in book.count()
    assert book.self_ns("activity") == {"data_wait": 2 * 9 + 5, "productive": 2 * 57}


def test_batches_whose_forward_raised_last_in_a_run_are_training() -> None:
    """The loop goes on after an error, and the run ends before another update."""
    tape = Tape().step().step()
    for _ in range(2):
        tape.ask().run(FORWARD, "model", 20, flags=3, end=Op.FAIL)

    book = account_for(tape)

    assert book.steps("eval") == []
    assert [step.counted for step in book.steps("train")] == [1, 1, 0]


# --- iterators, and batches that wait -------------------------------------------------------------


def fed(tape: Tape) -> ThreadAccount:
    """An account of the tape that is still open."""
    account = ThreadAccount(tape.started_ns, SourceTable().extend(tape.sources))
    account.feed(tape.times, tape.codes)
    return account


@pytest.mark.parametrize("loop", [
    pytest.param(lambda tape: tape.step(), id="training"),
    pytest.param(lambda tape: tape.forward().backward().update(), id="training without a loader"),
    pytest.param(lambda tape: tape.ask("test").forward(flags=0), id="evaluation"),
])  # fmt: skip
def test_an_iterator_that_is_requested_later_does_not_delay_other_time(loop: Callable[[Tape], Tape]) -> None:
    """``val_iter = iter(val_loader)`` before the loop. Captures and trackers wait until time is final."""
    tape = Tape().repeat(10, Tape.step).stop().start("val", iterator=1).repeat(100, loop)

    assert tape.now_ns - fed(tape).final_ns < 200


def test_the_creation_of_an_iterator_that_is_requested_after_a_step_is_a_wait_in_no_step() -> None:
    """The first validation may come hours after it. Its batch still shows how long the iterator took."""
    tape = (
        Tape().start("val", 40, iterator=1).repeat(3, Tape.step).ask("val", iterator=1).forward(11, flags=0)
    )

    book = account_for(tape.stop("val", iterator=1))

    assert book.durations() == [STEP] * 3
    assert book.durations("eval") == [5 + 11]
    assert book.self_ns("activity") == {"data_wait": 15, "productive": 3 * 57, "eval": 40 + 16 + 5}
    assert [row[4] for part in book.closed for row in part.batches.tolist()] == [-1, -1, -1, 40]


def test_the_creation_of_two_iterators_before_a_loop_is_of_the_first_step_that_requests_both() -> None:
    """``zip`` over two loaders creates both iterators first."""
    tape = Tape().start("a", 4, iterator=1).start("b", 6, iterator=2)
    tape.repeat(3, lambda t: t.ask("a", iterator=1).ask("b", iterator=2).forward().backward().update())

    assert account_for(tape).durations() == [4 + 6 + 67, 67, 67]


def test_an_iterator_that_is_exhausted_inside_a_checkpoint_leaves_its_creation_accounted_for() -> None:
    """The request is of the checkpoint; the creation came before it."""
    tape = trained().start("val", 40, iterator=1).begin(CHECKPOINT, "save").stop("val", 7, iterator=1)

    book = account_for(tape.end(CHECKPOINT, "save"))

    assert sum(book.self_ns("activity").values()) == tape.now_ns
    assert book.self_ns("activity")["checkpoint"] == 7


def test_a_zip_that_ends_without_a_batch_may_be_repeated() -> None:
    """Its second loader fails at the first request, and both iterators are deleted; the loop starts again."""
    tape = Tape()
    for turn in range(3):
        first, second = 2 * turn + 1, 2 * turn + 2
        tape.start("code", iterator=first).start("code", iterator=second)
        for _ in range(0 if turn else 10):
            tape.ask("code", iterator=first).ask("code", iterator=second).forward().backward().update()
        tape.ask("code", iterator=first).ask("code", iterator=second, op=Op.FAIL)
        tape.dispose("code", second).dispose("code", first)

    book = account_for(tape.forward())

    assert book.updates == 10
    assert sum(book.self_ns("activity").values()) == tape.now_ns


def test_a_request_takes_the_same_work_however_many_batches_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation with gradients in training mode waits until its pass ends: a backward may follow."""
    looked_at = 0
    has_forward = vars(Batch)["has_forward"]

    def counted(batch: Batch) -> bool:
        nonlocal looked_at
        looked_at += 1
        return bool(has_forward.fget(batch))

    monkeypatch.setattr(Batch, "has_forward", property(counted))
    tape = Tape().repeat(10, Tape.step).stop().repeat(300, lambda t: t.ask("val").forward(11))

    account = fed(tape)

    assert 300 <= looked_at < 300 * 5
    assert len(account.close(tape.now_ns).steps.phase) == 10 + 300
