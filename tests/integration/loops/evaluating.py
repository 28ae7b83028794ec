"""Evaluation in every manner, each time distinguished from training by what runs and not by what it is called."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    TRAIN_ALONE,
    TRAIN_AND_VAL,
    Net,
    Slow,
    Truth,
    Watch,
    Wrapper,
    loader,
    loop,
    loss_of,
    sgd,
    slow_loader,
    timed,
)


def glance(truth: Truth, model: nn.Module, rows: torch.Tensor, forwards: int) -> None:
    """Evaluate on rows in memory, without a loader: every forward is a step of evaluation."""
    before = truth.place
    truth.at(EVAL)
    with torch.no_grad():
        for _ in range(forwards):
            truth.forward(EVAL)
            model(rows)
            truth.step(EVAL)
    truth.at(*before)


@timed
def evaluation_left_in_training_mode(watch: Watch) -> None:
    """Gradients are off and the mode is training; no name says anything."""
    truth, (model, optimizer, left, right) = watch.slow_training(
        {"left": 4, "right": (3, 0.02)}, rated={"left": TRAIN, "right": EVAL}
    )
    for _ in range(2):
        truth.train_on(model, optimizer, left, name="left")
        truth.evaluate_on(model, right, "right")


@timed
def evaluation_with_gradients_in_eval_mode(watch: Watch) -> None:
    """Gradients are on, the mode is evaluation, and no backward ever comes."""
    truth, (model, optimizer, left, right) = watch.slow_training(
        {"left": 4, "right": (3, 0.02)}, rated={"left": TRAIN, "right": EVAL}
    )
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, left, name="left")
        model.eval()
        truth.at(EVAL, "right")
        for batch in right:
            truth.batch("right")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)


@timed
def statistics_before_training(watch: Watch) -> None:
    """A pass in training mode with gradients on sets the running statistics, before anything has trained: no backward comes."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 4})
    truth.at(EVAL, "train")
    for x, _ in train:
        truth.batch("train")
        truth.forward(EVAL)
        model(x)
        truth.step(EVAL)
    for _ in range(2):
        truth.train_on(model, optimizer, train)


@timed
def evaluation_with_gradients_and_no_loader(watch: Watch) -> None:
    """After the epoch some rows in memory are evaluated with gradients on; no ask tells it from training."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 4}, takes_s=0.02, rated=TRAIN_ALONE)
    rows = torch.randn(4, 4)
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.at(EVAL)
        for _ in range(3):
            truth.forward(EVAL)
            model(rows)
            truth.step(EVAL)


@timed
def evaluation_of_gradients_of_the_input(watch: Watch) -> None:
    """Saliency: ``autograd.grad`` to the input, in eval mode, in a run that has a backward elsewhere."""
    truth, (model, optimizer, train, images) = watch.slow_training(
        {"train": 4, "images": (3, 0.02)}, rated={"train": TRAIN, "images": EVAL}
    )
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.at(EVAL, "images")
        for x, y in images:
            truth.batch("images")
            x.requires_grad_()
            truth.forward(EVAL)
            torch.autograd.grad(loss_of(model, (x, y)), x)
            truth.step(EVAL)


class Encoding(nn.Module):
    """An encoder and a head, used together in training and apart elsewhere."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.encoder = Slow(truth)
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


@timed
def a_part_of_the_model_evaluated(watch: Watch) -> None:
    """Nearest neighbours: the whole model trains, its encoder alone is evaluated."""
    truth = watch.truth(rated={"train": TRAIN, "gallery": EVAL})
    model, train = Encoding(truth), slow_loader(truth, "train", 4)
    gallery = slow_loader(truth, "gallery", 3, 0.02)
    optimizer = sgd(model)
    watch(model, {"train": train, "gallery": gallery})
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.evaluate_on(model.encoder, gallery, "gallery")


@timed
def parts_of_the_model_trained(watch: Watch) -> None:
    """The loop calls encoder and head itself: two forwards per step, whatever contains them."""
    truth = watch.truth(rated={"train": TRAIN})
    model, train = Encoding(truth), slow_loader(truth, "train", 5)
    optimizer = sgd(model)
    watch(model, {"train": train})
    truth.at(TRAIN, "train")
    for x, y in train:
        truth.batch("train")
        truth.forward()
        hidden = model.encoder(x)
        truth.forward()
        truth.backward(F.cross_entropy(model.head(hidden), y))
        truth.update_that_ends_a_step(optimizer)


@timed
def the_model_inside_its_wrapper_evaluated(watch: Watch) -> None:
    """The wrapper trains; the model inside it, unwrapped, is evaluated."""
    truth = watch.truth(rated={"train": TRAIN, "val": EVAL})
    model, train, val = (
        Wrapper(Slow(truth)), slow_loader(truth, "train", 4), slow_loader(truth, "val", 3, 0.02)
    )  # fmt: skip
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.module.eval()
        truth.evaluate_on(model.module, val)


@timed
def estimates_without_a_loader(watch: Watch) -> None:
    """nanoGPT: batches are cut out of an array, and the loss is estimated at iteration 0 and every few after."""
    truth, (model, optimizer) = watch.slow_training({})
    rows = torch.randn(64, 4)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        where = torch.randint(len(rows), (4,))
        return rows[where], where % 2

    truth.at(TRAIN)
    x, y = get_batch()
    for iteration in range(9):
        if iteration % 4 == 0:
            model.eval()
            glance(truth, model, get_batch()[0], 4)
            model.train()
        truth.forward()
        loss = F.cross_entropy(model(x), y)
        x, y = get_batch()
        truth.work(0.02)
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@timed
def estimates_before_accumulated_steps(watch: Watch) -> None:
    """The same with two micro-batches per update, and the loss estimated in training mode."""
    truth, (model, optimizer) = watch.slow_training({})
    rows = torch.randn(64, 4)
    truth.at(TRAIN)
    for iteration in range(7):
        if iteration % 3 == 0:
            glance(truth, model, rows[:4], 5)
        for micro in range(2):
            truth.forward()
            loss = model(rows[micro * 4 : micro * 4 + 4]).square().mean() / 2
            truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@timed
def a_look_at_the_model_before_it_trains(watch: Watch) -> None:
    """Some rows in memory are evaluated, in training mode, before the first batch is asked for."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, takes_s=0.02, rated=TRAIN_ALONE)
    truth.sleep(0.08, "init")
    glance(truth, model, torch.randn(4, 4), 4)
    truth.train_on(model, optimizer, train)


@timed
def sampling_after_an_update(watch: Watch) -> None:
    """Every few steps text is generated, without gradients, in training mode, between update and ask."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 8}, takes_s=0.015, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i in {2, 5}:
            glance(truth, model, torch.randn(1, 4), 4)


@timed
def training_accuracy_on_the_training_loader(watch: Watch) -> None:
    """The loader of training is evaluated after every epoch: one loader, two phases."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 4})
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        truth.sleep(0.08, "outside")
        model.eval()
        truth.evaluate_on(model, train, "train")


@timed
def evaluation_by_generation(watch: Watch) -> None:
    """Every batch of evaluation takes several forwards, one per token: it is one step all the same."""
    truth, (model, optimizer, train, prompts) = watch.slow_training(
        {"train": 4, "prompts": 2}, rated={"train": TRAIN, "prompts": EVAL}
    )
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.at(EVAL, "prompts")
        with torch.no_grad():
            for x, _ in prompts:
                truth.batch("prompts")
                for _ in range(4):
                    truth.forward(EVAL)
                    model(x)
                truth.step(EVAL)


@timed
def answers_are_generated_before_they_are_learnt(watch: Watch) -> None:
    """Fine-tuning on own answers: forwards without gradients and the update are of one batch, and all training."""
    truth, (model, optimizer, prompts) = watch.slow_training({"prompts": 5}, rated={"prompts": TRAIN})
    truth.at(TRAIN, "prompts")
    for batch in prompts:
        truth.batch("prompts")
        with torch.no_grad():
            for _ in range(3):
                truth.forward()
                model(batch[0])
        truth.work(0.02)  # the reward
        truth.one_step(model, optimizer, batch)


@timed
def validation_between_slow_steps(watch: Watch) -> None:
    """A second loader is evaluated inside the first one's pass, after updates: no step contains it."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 8, "val": (3, 0.02)}, rated=TRAIN_AND_VAL
    )
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i in {3, 5}:
            model.eval()
            truth.evaluate_on(model, val)
            model.train()
            truth.at(TRAIN, "train")


@timed
def validation_that_suspends_a_slow_step(watch: Watch) -> None:
    """A second loader is evaluated before the update of a group: the step goes on after it, and is no longer."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 8, "val": (3, 0.02)}, rated=TRAIN_AND_VAL
    )
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        if i % 4 == 3:
            truth.update_that_ends_a_step(optimizer)
        if i in {1, 5}:
            model.eval()
            truth.evaluate_on(model, val)
            model.train()
            truth.at(TRAIN, "train")


@timed
def a_probe_in_mid_group(watch: Watch) -> None:
    """In a group of accumulated batches some rows in memory are evaluated, after a backward."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 8}, takes_s=0.015, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        if i % 4 == 3:
            truth.update_that_ends_a_step(optimizer)
        if i in {1, 5}:
            glance(truth, model, torch.randn(4, 4), 3)


@timed
def hard_examples_are_chosen_first(watch: Watch) -> None:
    """A forward without gradients picks the rows that are trained on: both forwards are training."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 6}, takes_s=0.02, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for x, y in train:
        truth.batch("train")
        with torch.no_grad():
            truth.forward()
            hard = F.cross_entropy(model(x), y, reduction="none").topk(2).indices
        truth.one_step(model, optimizer, (x[hard], y[hard]))


class Distillation:
    """A slow teacher, its student, and what the student learns from."""

    def __init__(self, watch: Watch) -> None:
        self.truth = watch.truth(rated={"train": TRAIN})
        self.student, self.teacher = Slow(self.truth, 0.01), Slow(self.truth, 0.03)
        self.train, self.optimizer = slow_loader(self.truth, "train", 6), sgd(self.student)
        watch({"student": self.student, "teacher": self.teacher}, {"train": self.train})
        self.teacher.eval()
        self.truth.at(TRAIN, "train")

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """The forwards of a step: the teacher's without gradients, then the student's."""
        self.truth.batch("train")
        with torch.no_grad():
            self.truth.forward(model="teacher")
            wanted = self.teacher(x)
        self.truth.forward(model="student")
        loss: torch.Tensor = (self.student(x) - wanted).square().mean()
        return loss

    def learn(self, loss: torch.Tensor) -> None:
        """The rest of a step."""
        self.truth.backward(loss)
        self.truth.update_that_ends_a_step(self.optimizer)


@timed
def a_teacher_that_is_slow(watch: Watch) -> None:
    """Distillation in time: the teacher's forward, without gradients, is training like the student's."""
    distillation = Distillation(watch)
    for x, _ in distillation.train:
        distillation.learn(distillation.loss(x))


@timed
def a_step_given_up_after_its_teacher(watch: Watch) -> None:
    """Distillation skips a loss that is not finite: both forwards are training, although no backward comes."""
    distillation = Distillation(watch)
    for number, (x, _) in enumerate(distillation.train):
        loss = distillation.loss(x)
        if number not in {0, 3}:
            distillation.learn(loss)


@loop
def a_batch_skipped_after_its_teacher(watch: Watch) -> None:
    """Pseudo-labels: if the teacher is not sure, the loop takes the next batch. The wait and the forward are of the next step."""
    student, teacher, train, truth = Net(), Net().eval(), loader(6), watch.truth()
    optimizer = sgd(student)
    watch({"student": student, "teacher": teacher}, {"train": train})
    for number, (x, y) in enumerate(train):
        truth.batch("train")
        truth.forward(model="teacher")
        with torch.no_grad():
            teacher(x)
        if number in {2, 3}:
            continue
        truth.forward(model="student")
        truth.backward(F.cross_entropy(student(x), y))
        truth.update_that_ends_a_step(optimizer)


@timed
def a_batch_fetched_between_a_student_and_its_backward(watch: Watch) -> None:
    """The next batch is fetched while the device works at the loss: the teacher's forward is training, as the student's."""
    distillation = Distillation(watch)
    batches = iter(distillation.train)
    batch = next(batches, None)
    while batch is not None:
        loss = distillation.loss(batch[0])
        batch = next(batches, None)
        distillation.learn(loss)


@timed
def a_moving_average_teaches_and_is_evaluated(watch: Watch) -> None:
    """Self-distillation: the average of the weights teaches in every step, and is what is evaluated afterwards."""
    truth = watch.truth(rated={"train": TRAIN, "val": EVAL})
    student, train, val = Slow(truth), slow_loader(truth, "train", 4), slow_loader(truth, "val", 3, 0.02)
    teacher = Slow(truth)
    teacher.load_state_dict(student.state_dict())
    optimizer = sgd(student)
    watch({"student": student, "teacher": teacher}, {"train": train, "val": val})
    for _ in range(2):
        truth.at(TRAIN, "train")
        for x, _ in train:
            truth.batch("train")
            truth.forward(model="student")
            out = student(x)
            with torch.no_grad():
                truth.forward(model="teacher")
                wanted = teacher(x)
            truth.backward()
            (out - wanted).square().mean().backward()
            truth.update(optimizer)
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
            truth.step()
        truth.at(EVAL, "val")
        with torch.no_grad():
            for x, _ in val:
                truth.batch("val")
                truth.forward(EVAL, model="teacher")
                teacher(x)
                truth.step(EVAL)


@timed
def two_views_of_a_batch_and_a_probe(watch: Watch) -> None:
    """Contrastive learning: two forwards and one backward per step; a classifier on top is evaluated by epoch."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 4, "val": (2, 0.02)}, rated=TRAIN_AND_VAL
    )
    for _ in range(2):
        truth.at(TRAIN, "train")
        for x, _ in train:
            truth.batch("train")
            truth.forward()
            truth.forward()
            truth.backward((model(x) - model(x + 0.1)).square().mean())
            truth.update_that_ends_a_step(optimizer)
        truth.evaluate_on(model, val)


@timed
def zipped_loaders_that_later_run_alone(watch: Watch) -> None:
    """First both give a batch per step; then one trains alone, and the other is evaluated alone."""
    truth, (model, optimizer, code, prose) = watch.slow_training({"code": 3, "prose": 3}, owners=False)
    truth.at(TRAIN, "code")
    for first, second in zip(code, prose, strict=False):
        truth.batch("code")
        truth.batch("prose")
        truth.forward()
        truth.backward(truth.loss(model, first) + loss_of(model, second))
        truth.update_that_ends_a_step(optimizer)
    truth.sleep(0.08, "outside")
    truth.train_on(model, optimizer, prose, name="prose")
    truth.sleep(0.08, "outside")
    truth.evaluate_on(model, code, "code")


@timed
def alternating_loaders_after_a_zip(watch: Watch) -> None:
    """Loaders that were asked together are asked in turn: each ask is a batch of its own."""
    truth, (model, optimizer, code, prose) = watch.slow_training({"code": 4, "prose": 4}, owners=False)
    truth.at(TRAIN, "code")
    for first, second in itertools.islice(zip(code, prose, strict=False), 2):
        truth.batch("code")
        truth.batch("prose")
        truth.forward()
        truth.backward(truth.loss(model, first) + loss_of(model, second))
        truth.update_that_ends_a_step(optimizer)
    live = {"code": iter(code), "prose": iter(prose)}
    for _ in range(3):
        for name, batches in live.items():
            truth.at(TRAIN, name)
            batch = next(batches)
            truth.batch(name)
            truth.one_step(model, optimizer, batch)


@loop
def evaluation_of_a_copy_that_was_given(watch: Watch) -> None:
    """The averaged model is given too, and evaluated by rows in memory after every epoch."""
    model, train, truth = Net(), loader(5), watch.truth()
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    watch({"model": model, "average": average}, {"train": train})
    for _ in range(2):
        truth.train_on(model, optimizer, train)
        with torch.no_grad():
            for _ in range(3):
                truth.forward(EVAL, model="average")
                average(torch.randn(4, 4))
                truth.step(EVAL)


@timed
def attacked_by_backward_in_every_batch_of_an_evaluation(watch: Watch) -> None:
    """Adversarial accuracy: the examples are made by ``backward`` to the input. The loader's name says what they are for."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 5, "val": (3, 0.02)}, rated=TRAIN_AND_VAL
    )
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.at(EVAL, "val")
        for x, y in val:
            truth.batch("val")
            noise = torch.zeros_like(x, requires_grad=True)
            for _ in range(2):
                truth.forward(EVAL)
                truth.backward(loss_of(model, (x + noise, y)), EVAL)
                assert noise.grad is not None
                noise.data += 0.1 * noise.grad.sign()
            with torch.no_grad():
                truth.forward(EVAL)
                model(x + noise)
            truth.step(EVAL)


@loop
def an_attack_alone(watch: Watch) -> None:
    """The tutorial of the fast gradient sign method: a trained model, a loader of tests, a backward per batch, no update."""
    truth, (model, _, test) = watch.training({"test": 9}, source="backward")
    model.eval()
    for x, y in test:
        truth.batch("test")
        x.requires_grad_()
        truth.forward("test")
        truth.backward(loss_of(model, (x, y)), "test")
        truth.forward("test")
        model(x + 0.1 * x.grad.sign())
        truth.step("test")


@timed
def squared_gradients_of_every_task(watch: Watch) -> None:
    """Elastic weight consolidation: after a task its rows give gradients in evaluation mode, which are squared; no optimizer uses them."""
    truth, (model, optimizer, first, second) = watch.slow_training({"first": 4, "second": (3, 0.02)})
    for name, rows in {"first": first, "second": second}.items():
        model.train()
        for _ in range(2):
            truth.train_on(model, optimizer, rows, name=name)
        model.eval()
        truth.at(EVAL, name)
        squares = [torch.zeros_like(weight) for weight in model.parameters()]
        for batch in rows:
            truth.batch(name)
            optimizer.zero_grad()
            truth.forward(EVAL)
            truth.backward(loss_of(model, batch), EVAL)
            for square, weight in zip(squares, model.parameters(), strict=True):
                square.add_(weight.grad**2)
            truth.step(EVAL)


@loop
def groups_of_a_loader_named_val(watch: Watch) -> None:
    """Two backwards per update, on a loader whose name says evaluation: training says more."""
    truth, (model, optimizer, val) = watch.training({"val": 6})
    for i, batch in enumerate(val):
        truth.batch("val")
        truth.backward(truth.loss(model, batch))
        if i % 2:
            truth.update_that_ends_a_step(optimizer)
