"""Small loops, each counted by head. docs/reference/step-boundaries.md says what a step, a phase and a stage are."""

from __future__ import annotations

import pytest

from otel_train.recording.events import Flag, Op, SourceKind
from tests.support.edges import Tape, account_for

MICRO = 55
STEP = 62
"""See ``Tape.micro`` and ``Tape.step``."""


def test_a_plain_loop_has_one_step_per_update() -> None:
    """The usual loop."""
    tape = Tape()
    for _ in range(3):
        tape.step()

    book = account_for(tape.stop())

    assert book.durations() == [STEP] * 3
    assert book.partial() == []
    assert book.count() == {"code": 3, "model": 3, "backward": 3, "SGD": 3}
    assert book.self_ns("owner") == {"code": 20, "model": 60, "backward": 90, "SGD": 21}
    assert book.self_ns("activity") == {"data_wait": 20, "productive": 171}
    assert book.updates == 3


def test_time_before_the_first_stage_is_init_and_gaps_are_nobodys() -> None:
    """Time between stages must not vanish."""
    tape = Tape(started_ns=100).spend(40)
    for _ in range(2):
        tape.step().spend(3)

    book = account_for(tape.stop())

    assert book.durations() == [STEP + 3] * 2
    assert book.self_ns("activity")["init"] == 40
    assert book.self_ns("owner")[""] == 46


def test_accumulation_is_one_step_per_update_and_the_remainder_is_partial() -> None:
    """Two micro-batches per update, and one left over at the end."""
    tape = Tape()
    for _ in range(2):
        tape.micro().micro().update()
    tape.micro().stop()

    book = account_for(tape)

    assert book.durations() == [MICRO * 2 + 7] * 2
    assert book.partial() == [MICRO]
    assert book.self_ns("phase") == {"train": 2 * 117 + 60}


def test_a_remainder_goes_on_in_the_next_epoch() -> None:
    """The gradients are still there, so the step is still open."""
    tape = Tape().micro().micro().update().micro().stop()
    tape.micro().update().stop()

    book = account_for(tape)

    assert book.durations() == [117, MICRO + MICRO + 7]


def test_zipped_loaders_fetch_one_batch_together() -> None:
    """One step, two loaders asked; the label is the one fetched last."""
    tape = Tape()
    for _ in range(3):
        tape.ask("code", 5, samples=4).ask("prose", 6, samples=2).forward().backward().update()
    tape.stop("code")

    book = account_for(tape)

    assert book.durations() == [5 + 6 + 57] * 3
    assert [step.samples for step in book.steps() if step.counted] == [6, 6, 6]
    assert {step.loader for step in book.steps()} == {"prose"}
    assert book.count()["code"] == book.count()["prose"] == 3
    assert [call.loader for call in book.calls("code")] == ["code"] * 3
    assert book.batches() == {"code": [("train", 4)] * 3, "prose": [("train", 2)] * 3}


def test_a_loader_that_looks_ahead_gives_one_step_per_update() -> None:
    """``nxt = next(it)`` before the work on ``batch``, as accelerate does."""
    tape = Tape().ask()
    for _ in range(3):
        tape.ask().forward().backward().update()
    tape.stop().forward().backward().update()

    book = account_for(tape)

    assert book.durations() == [5 + STEP, STEP, STEP, STEP - 5]
    assert book.self_ns("phase") == {"train": 5 + 4 * STEP}


def test_a_loader_that_looks_ahead_between_backward_and_update_gives_one_step_per_update() -> None:
    """The first ask after an update closes its step, wherever in the loop it stands."""
    tape = Tape().ask()
    for _ in range(3):
        tape.forward().backward().ask().update()

    assert account_for(tape).durations() == [5 + 50 + 5 + 7 + 50, STEP, 5 + 7]


def test_two_optimizers_in_one_batch_are_one_step() -> None:
    """A GAN: discriminator and generator."""
    tape = Tape()
    for _ in range(3):
        tape.micro().update(7, "D").forward().backward().update(9, "G")

    book = account_for(tape)

    assert book.durations() == [MICRO + 7 + 50 + 9] * 3
    assert book.updates == 6


def test_two_optimizers_without_asks_close_before_the_first_updates_again() -> None:
    """The same GAN on synthetic noise, without a loader."""
    tape = Tape()
    for _ in range(3):
        tape.forward().backward().update(7, "D").forward().backward().update(9, "G")

    assert account_for(tape).durations() == [50 + 7 + 50 + 9] * 3


def test_an_optimizer_that_updates_twice_in_a_row_closes_a_step_each_time() -> None:
    """PPO: several epochs over one rollout, no ask between."""
    tape = Tape().ask()
    for _ in range(3):
        tape.forward().backward().update()

    book = account_for(tape.ask().forward().backward().update())

    assert book.durations() == [5 + 57, 57, 57, STEP]


def test_the_second_optimizer_twice_in_a_row_closes_a_step() -> None:
    """D, G, G: the second G begins a step of its own."""
    tape = Tape().ask().update(7, "D").update(9, "G").spend(2).update(9, "G").ask().update(7, "D")

    assert account_for(tape).durations() == [5 + 7 + 9, 2 + 9, 5 + 7]


def test_a_closure_runs_inside_the_optimizer_and_is_cut_out_of_it() -> None:
    """LBFGS evaluates the model several times in one update."""
    tape = Tape()
    for _ in range(2):
        tape.ask().begin(SourceKind.OPTIMIZER, "LBFGS").spend(1)
        tape.forward().backward().spend(1).forward().backward().spend(1)
        tape.end(SourceKind.OPTIMIZER, "LBFGS")

    book = account_for(tape.stop())

    assert book.durations() == [5 + 103] * 2
    assert book.self_ns("owner")["LBFGS"] == 6
    assert [call.inclusive_ns for call in book.calls("LBFGS")] == [103, 103]
    assert book.count() == {"code": 2, "model": 4, "backward": 4, "LBFGS": 2}


def test_an_update_inside_an_update_is_none() -> None:
    """A wrapper such as SAM or Lookahead steps its inner optimizer."""
    tape = Tape()
    for _ in range(2):
        tape.micro().begin(SourceKind.OPTIMIZER, "SAM").spend(2).update(3, "SGD").spend(2)
        tape.end(SourceKind.OPTIMIZER, "SAM")

    book = account_for(tape)

    assert book.durations() == [MICRO + 7] * 2
    assert book.updates == 2
    assert book.self_ns("owner")["SAM"] == 14
    assert "SGD" not in book.count()


def test_an_optimizer_that_raised_is_closed_by_the_next_ask() -> None:
    """The post hook of a raising step never runs."""
    tape = Tape().step().micro().begin(SourceKind.OPTIMIZER, "SGD").spend(4).step().stop()

    book = account_for(tape)

    assert book.durations() == [STEP, MICRO + 4 + STEP]
    assert book.updates == 2
    assert [(call.inclusive_ns, call.failed) for call in book.calls("SGD")] == [(7, 0), (4, 1), (7, 0)]
    assert [step.failed for step in book.steps("train") if step.counted] == [0, 1]


def test_an_optimizer_that_raised_is_closed_by_its_own_next_step() -> None:
    """The same without a loader."""
    tape = Tape().forward().backward().begin(SourceKind.OPTIMIZER, "SGD").spend(4)
    tape.forward().backward().update()

    book = account_for(tape)

    assert book.updates == 1
    assert [(call.inclusive_ns, call.failed) for call in book.calls("SGD")] == [(54, 1), (7, 0)]
    assert book.count()["model"] == 2


def test_validation_between_updates_closes_the_step_and_is_steps_of_its_own() -> None:
    """A slow validation must not read as a slow training step."""
    tape = Tape().step().step().validate(2).step().step().stop()

    book = account_for(tape)

    assert book.durations() == [STEP] * 2 + [STEP] * 2
    assert book.durations("eval") == [16, 16]
    assert book.self_ns("activity")["eval"] == 16 + 16 + 5
    assert {step.loader for step in book.steps("eval")} == {"val"}


def test_validation_in_mid_group_suspends_the_step() -> None:
    """Between two micro-batches: the step goes on after it."""
    tape = Tape().micro().validate(2).micro().update().stop()

    book = account_for(tape)

    (step,) = book.steps("train")
    assert step.duration_ns == 117
    assert step.ended_ns - step.started_ns == 117 + 37
    assert book.durations("eval") == [16, 16]


def test_a_checkpoint_after_an_update_closes_the_step() -> None:
    """Saving is neither this step nor the next."""
    tape = Tape()
    for _ in range(2):
        tape.step().run(SourceKind.CHECKPOINT, "checkpoint", 100)
    tape.stop()

    book = account_for(tape)

    assert book.durations() == [STEP] * 2
    assert book.self_ns("activity")["checkpoint"] == 200
    assert [(call.inclusive_ns, call.step, call.phase) for call in book.calls("checkpoint")] == [
        (100, -1, "")
    ] * 2


def test_a_checkpoint_before_an_update_suspends_the_step() -> None:
    """Its time is not the step's."""
    tape = Tape().step().micro().run(SourceKind.CHECKPOINT, "checkpoint", 100).update().stop()

    book = account_for(tape)

    assert book.durations() == [STEP, STEP]
    assert [step.ended_ns - step.started_ns for step in book.steps("train")] == [STEP, STEP + 100]


def test_the_ask_that_finds_the_end_closes_the_step_and_is_of_none() -> None:
    """It waits for data, and there is none."""
    tape = Tape().step().stop().step().stop()

    book = account_for(tape)

    assert book.durations() == [STEP, STEP]
    assert book.self_ns("activity") == {"data_wait": 20, "productive": 2 * 57}
    assert book.count()["code"] == 2
    assert [source for part in book.closed for source, *_ in part.endings.tolist()] == [0, 0]


def test_a_batch_that_is_passed_over_belongs_to_the_step_that_follows() -> None:
    """``continue`` on a bad batch."""
    tape = Tape().step().ask().ask().forward().backward().update().stop()

    book = account_for(tape)

    assert book.durations() == [STEP, 5 + STEP]
    assert book.batches()["code"] == [("train", -1)] * 3


def test_a_failed_ask_is_no_batch() -> None:
    """A dataset that raises, and a loop that goes on."""
    tape = Tape().step().ask(op=Op.FAIL).step().stop()

    book = account_for(tape)

    assert book.durations() == [STEP, STEP]
    assert book.count()["code"] == 2
    assert sum(len(part.failed_asks) for part in book.closed) == 1


def test_a_loader_read_inside_a_loader_is_data_of_the_outer_one_and_a_batch_of_its_own() -> None:
    """A wrapper that yields from a DataLoader, both instrumented."""
    tape = Tape()
    for _ in range(2):
        tape.begin(SourceKind.DATA, "outer").spend(1).ask("inner", 4, samples=3).spend(1)
        tape.end(SourceKind.DATA, "outer").forward().backward().update()
    tape.stop("outer")

    book = account_for(tape)

    assert book.durations() == [6 + 57] * 2
    assert book.count() == {"outer": 2, "model": 2, "backward": 2, "SGD": 2}
    assert book.self_ns("owner")["outer"] == 12 + 5
    assert book.batches() == {"outer": [("train", -1)] * 2, "inner": [("train", 3)] * 2}


def test_a_forward_inside_backward_stays_in_backward() -> None:
    """Activation checkpointing runs the forward again."""
    tape = Tape().ask().forward().begin(SourceKind.BACKWARD, "backward").spend(10)
    tape.forward(15).backward(5).spend(10).end(SourceKind.BACKWARD, "backward").update()

    book = account_for(tape)

    assert book.durations() == [5 + 20 + 40 + 7]
    assert book.count() == {"code": 1, "model": 1, "backward": 1, "SGD": 1}
    assert book.self_ns("owner")["backward"] == 40


def test_a_forward_inside_a_forward_is_one_call() -> None:
    """A model that calls a part which is instrumented as well."""
    tape = Tape().ask().begin(SourceKind.FORWARD, "model", flags=3).spend(5).forward(10, "encoder").spend(5)
    tape.end(SourceKind.FORWARD, "model").backward().update()

    book = account_for(tape)

    assert book.count() == {"code": 1, "model": 1, "backward": 1, "SGD": 1}
    assert book.self_ns("owner")["model"] == 20


def test_autograd_inside_a_forward_is_cut_out_of_it() -> None:
    """A backward in forward, as in meta-learning."""
    tape = Tape().ask().begin(SourceKind.FORWARD, "model", flags=3).spend(5).backward(10).spend(5)
    tape.end(SourceKind.FORWARD, "model").backward().update()

    book = account_for(tape)

    assert book.self_ns("owner")["model"] == 10
    assert book.self_ns("owner")["backward"] == 40
    assert [call.inclusive_ns for call in book.calls("model")] == [20]


def test_autograd_grad_stays_where_it_runs_once_there_is_a_backward() -> None:
    """A gradient penalty is part of the forward's loss."""
    tape = Tape().micro()
    tape.begin(SourceKind.STAGE, "penalty").spend(1).run(SourceKind.GRAD, "grad", 8).spend(1)
    tape.end(SourceKind.STAGE, "penalty").update()

    book = account_for(tape)

    assert book.self_ns("owner")["penalty"] == 10
    assert "grad" not in book.count()


def test_autograd_grad_is_the_backward_of_a_run_without_another() -> None:
    """Loops that write the gradients themselves."""
    tape = Tape()
    for _ in range(2):
        tape.ask().forward().run(SourceKind.GRAD, "grad", 30).update()

    book = account_for(tape)

    assert book.count()["grad"] == 2
    assert book.durations() == [STEP] * 2


def test_backwards_are_the_steps_of_a_pass_without_an_update() -> None:
    """An optimizer that torch does not know of."""
    tape = Tape()
    for _ in range(3):
        tape.micro().spend(7)
    tape.stop()

    book = account_for(tape)

    assert book.durations() == [MICRO + 7] * 3
    assert book.partial() == []


def test_backwards_are_the_steps_after_sixty_four_without_an_update() -> None:
    """A pass may never end."""
    tape = Tape()
    for _ in range(70):
        tape.micro()

    assert len(account_for(tape).durations()) == 70


def test_batches_are_the_steps_where_there_is_no_backward() -> None:
    """Training by other means, with the model in training mode."""
    tape = Tape()
    for _ in range(3):
        tape.ask().forward()
    tape.stop()

    book = account_for(tape)

    assert book.durations() == [25] * 3


def test_manual_marks_are_the_steps() -> None:
    """``step()`` overrules everything else."""
    tape = Tape()
    for _ in range(2):
        tape.step().step().spend(1).mark()
    tape.stop()

    book = account_for(tape)

    assert book.durations() == [2 * STEP + 1] * 2


def test_a_number_set_manually_is_that_of_the_open_step() -> None:
    """``step(start=100)`` after a resume."""
    tape = Tape().mark(100).step().step().stop()

    book = account_for(tape)

    assert book.durations() == [STEP] * 2
    assert book.numbers == [100, -1]


def test_a_forward_that_evaluates_a_trained_model_without_a_loader_is_an_eval_step() -> None:
    """No loader at all: the forwards carry the phase."""
    tape = Tape()
    for _ in range(2):
        tape.forward().backward().update()
    tape.forward(11, flags=0)
    tape.forward().backward().update()

    book = account_for(tape)

    assert book.durations() == [57] * 3
    assert book.durations("eval") == [11]


def test_a_teacher_without_grad_in_a_loop_without_a_loader_is_no_eval_step() -> None:
    """Distillation: the teacher is never trained."""
    tape = Tape()
    for _ in range(2):
        tape.forward(11, "teacher", flags=0).forward().backward().update()

    book = account_for(tape)

    assert book.durations() == [68] * 2
    assert book.durations("eval") == []


def test_sampling_after_the_last_pass_is_evaluation() -> None:
    """A forward without gradients that no update follows is no step."""
    tape = Tape().step().stop().spend(3).forward(50, flags=0).spend(4)

    book = account_for(tape)

    assert book.durations() == [STEP]
    assert book.durations("eval") == [50]
    assert book.self_ns("activity") == {"data_wait": 10, "productive": 57, "eval": 50, "outside": 7}


def test_a_stage_around_the_whole_loop_leaves_the_steps_alone() -> None:
    """``with stage("fit")`` owns the time that is in no other stage."""
    tape = Tape().begin(SourceKind.STAGE, "fit").spend(3)
    for _ in range(2):
        tape.step().spend(3)
    tape.stop().end(SourceKind.STAGE, "fit")

    book = account_for(tape)

    assert book.durations() == [STEP + 3] * 2
    assert book.self_ns("owner")["fit"] == 9
    assert [call.inclusive_ns for call in book.calls("fit")] == [3 + 2 * 65 + 5]


def test_a_stage_that_is_suspended_counts_only_while_it_runs() -> None:
    """Across ``await`` others run."""
    tape = Tape().ask()
    tape.piece("augment", 4, Op.SUSPEND, 1).forward().piece("augment", 6, Op.END, 1)
    tape.backward().update().stop()

    book = account_for(tape)

    assert [call.inclusive_ns for call in book.calls("augment")] == [10]
    assert book.durations() == [STEP + 10]


def test_a_scaler_that_skips_makes_no_update() -> None:
    """The first steps of mixed precision overflow."""
    tape = Tape().micro().run(SourceKind.SCALER, "GradScaler", 2)
    tape.micro().begin(SourceKind.SCALER, "GradScaler").spend(1).update().spend(1)
    tape.end(SourceKind.SCALER, "GradScaler").stop()

    book = account_for(tape)

    assert (book.updates, book.skipped_updates) == (1, 1)
    assert book.durations() == [MICRO + 2 + MICRO + 9]
    assert book.count()["GradScaler"] == 2


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


def test_what_an_exception_left_open_is_unwound_by_the_outer_edge() -> None:
    """A forward whose end was lost must not swallow the rest of the run."""
    tape = Tape().begin(SourceKind.STAGE, "try").begin(SourceKind.FORWARD, "model", flags=3).spend(4)
    tape.end(SourceKind.STAGE, "try", op=Op.FAIL).step().stop()

    book = account_for(tape)

    assert [(call.inclusive_ns, call.failed) for call in book.calls("model")] == [(4, 1), (20, 0)]
    assert book.updates == 1


def test_training_in_two_phases_of_one_loader_is_distinguished_by_what_is_done() -> None:
    """K-fold loops validate on the same loader."""
    tape = Tape().step().stop().ask().forward(11, flags=0).ask().forward(11, flags=0).stop().step().stop()

    book = account_for(tape)

    assert book.durations() == [STEP, STEP]
    assert book.durations("eval") == [16, 16]


def test_marks_alone_make_as_many_steps_as_there_are_marks() -> None:
    """A loop without loader, optimizer or model is still a loop."""
    tape = Tape()
    for _ in range(3):
        tape.run(SourceKind.STAGE, "work", 5).mark()

    assert account_for(tape).durations() == [5, 5, 5]


def test_making_an_iterator_belongs_to_the_batches_it_will_give() -> None:
    """Starting the workers of a validation loader must not read as training that waits."""
    tape = Tape().step().stop()
    loader = tape.source(SourceKind.DATA, "val")
    tape.edge(Op.BEGIN, loader, Flag.START)
    tape.spend(1000).edge(Op.END, loader, Flag.START)
    tape.ask("val").forward(flags=0).stop("val").step()

    book = account_for(tape)

    assert book.count()["val"] == 1
    assert book.durations("eval") == [1000 + 5 + 20]
    assert book.self_ns("activity")["eval"] == 1000 + 5 + 20 + 5


@pytest.mark.parametrize("cuts", [(), range(1, 60)], ids=["in one slice", "edge by edge"])
def test_a_loader_that_is_new_is_for_what_its_first_used_batch_is_for(cuts: tuple[int, ...]) -> None:
    """Trainers fetch a batch ahead: the first ask shows nothing before the second, and is no training for that."""
    tape = Tape()
    for _ in range(3):
        tape.step()
    tape.stop().ask("fresh")
    for _ in range(2):
        tape.ask("fresh").forward(flags=0)
    tape.stop("fresh").forward(flags=0)

    book = account_for(tape, cuts)

    assert len(book.durations()) == 3
    assert len(book.steps("eval")) == 3
    assert [phase for phase, _ in book.batches()["fresh"]] == ["eval"] * 3


def test_a_function_that_makes_a_whole_update_is_a_step() -> None:
    """JAX compiles forward, backward and update into one call: there is nothing else to count."""
    tape = Tape()
    for _ in range(3):
        tape.ask().run(SourceKind.WHOLE, "make_step", 50)

    book = account_for(tape.stop())

    assert book.durations() == [55] * 3
    assert book.updates == 3
    assert book.self_ns("owner") == {"code": 20, "make_step": 150}
    assert book.self_ns("activity") == {"data_wait": 20, "productive": 150}
    assert book.self_ns("phase") == {"train": 170}


def test_an_update_inside_a_whole_update_is_none() -> None:
    """A step that is not compiled as a whole may have its parts timed as well."""
    tape = Tape()
    for _ in range(2):
        tape.ask().begin(SourceKind.WHOLE, "make_step").run(SourceKind.STAGE, "loss", 30).update().spend(3)
        tape.end(SourceKind.WHOLE, "make_step")

    book = account_for(tape.stop())

    assert book.durations() == [45] * 2
    assert book.updates == 2
    assert book.self_ns("owner") == {"code": 15, "loss": 60, "SGD": 14, "make_step": 6}


def test_two_whole_updates_in_turn_are_one_step() -> None:
    """A generator and a discriminator, one batch."""
    tape = Tape()
    for _ in range(2):
        tape.ask().run(SourceKind.WHOLE, "generator", 20).run(SourceKind.WHOLE, "critic", 30)

    book = account_for(tape.stop())

    assert book.durations() == [55] * 2
    assert book.updates == 4


def test_a_whole_update_that_fails_makes_no_step() -> None:
    """Nothing was updated; the program goes on with the next batch."""
    tape = Tape().ask().run(SourceKind.WHOLE, "make_step", 20, end=Op.FAIL)
    tape.ask().run(SourceKind.WHOLE, "make_step", 20)

    book = account_for(tape.stop())

    assert book.durations() == [50]
    assert book.updates == 1


def test_a_checkpoint_inside_a_declared_batch_makes_no_further_step_of_it() -> None:
    """A batch is a step once, whether its phase was declared or found."""
    tape = Tape().step().ask("held out", phase="eval").forward(11, flags=0)
    tape.run(SourceKind.CHECKPOINT, "checkpoint", 40).spend(2).stop("held out", phase="eval")

    book = account_for(tape)

    assert book.durations("eval") == [16]
    assert book.self_ns("phase") == {"train": STEP, "eval": 23, "": 40}
