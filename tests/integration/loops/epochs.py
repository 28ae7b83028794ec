"""Loops by what happens at their edges: breaks, skips, nesting, several in a row."""

from __future__ import annotations

import copy
import io
import threading

import torch

import otel_train
from tests.integration.loops.truth import Net, Watch, loader, loop, loss_of, sgd, timed


@loop
def early_break_after_the_update(watch: Watch) -> None:
    """An epoch is cut short; the iterator is dropped without having run out."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for _ in range(3):
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
            if i == 2:
                break


@loop
def early_break_with_a_batch_in_hand(watch: Watch) -> None:
    """The batch that is fetched and dropped is a batch, and no step."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for _ in range(2):
        for i, batch in enumerate(train):
            truth.batch("train")
            if i == 3:
                break
            truth.one_step(model, optimizer, batch)


@loop
def batches_that_are_skipped(watch: Watch) -> None:
    """``continue`` before the forward, and after it: such a batch is part of the next step."""
    truth, (model, optimizer, train) = watch.training({"train": 9})
    for i, batch in enumerate(train):
        truth.batch("train")
        if i % 3 == 0:
            continue
        loss = truth.loss(model, batch)
        if i == 4:
            continue
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@loop
def an_inner_loop_with_updates(watch: Watch) -> None:
    """A loader inside the batch loop, an update per inner batch."""
    truth, (model, optimizer, tasks, support) = watch.training({"tasks": 4, "support": 3})
    for _ in tasks:
        truth.batch("tasks")
        truth.train_on(model, optimizer, support, name="support")


@timed
def a_slow_inner_loop_without_updates(watch: Watch) -> None:
    """Gradients gather over the inner loader, and one update per outer batch: both loaders are waited for in one step."""
    truth, (model, optimizer, tasks, support) = watch.slow_training(
        {"tasks": (3, 0.03), "support": 3}, owners=False
    )
    for task in tasks:
        truth.batch("tasks")
        for batch in support:
            truth.batch("support")
            truth.backward(truth.loss(model, batch))
        truth.one_step(model, optimizer, task)


@timed
def work_after_the_update_of_an_inner_loop(watch: Watch) -> None:
    """The inner pass has ended when the update comes; what follows it, up to the next ask of the outer pass, is of the step."""
    truth, (model, optimizer, tasks, support) = watch.slow_training({"tasks": 5, "support": 2}, owners=False)
    for i, _ in enumerate(tasks):
        truth.batch("tasks")
        for batch in support:
            truth.batch("support")
            truth.backward(truth.loss(model, batch))
        truth.update(optimizer)
        if i < 4:
            truth.work(0.03)
        truth.step()


@loop
def one_step_in_all(watch: Watch) -> None:
    """The shortest training there is."""
    truth, (model, optimizer, train) = watch.training({"train": 1})
    truth.train_on(model, optimizer, train)


@loop
def nothing_at_all(watch: Watch) -> None:
    """A run that ends before it began has time, and nothing else."""
    watch(Net(), {"train": loader(2)})
    watch.truth(source=None)


@loop
def an_empty_loader_beside_a_full_one(watch: Watch) -> None:
    """The end of a loader is an ask, and nothing more."""
    truth, (model, optimizer, train, empty) = watch.training({"train": 5, "empty": 0})
    for batch in train:
        truth.batch("train")
        for extra in empty:
            truth.learn(model, optimizer, extra)
        truth.one_step(model, optimizer, batch)


@loop
def trainings_one_after_the_other(watch: Watch) -> None:
    """Three sessions in one process; the last knows nothing of the others."""
    for fold in range(3):
        model, train, truth = Net(), loader(3 + fold), watch.truth()
        optimizer = sgd(model)
        session = watch(model, {"train": train})
        truth.train_on(model, optimizer, train)
        session.close()


@loop
def folds_under_the_same_names(watch: Watch) -> None:
    """Cross-validation in one session: a later call reuses a name, and the series goes on."""
    truth = watch.truth()
    for _ in range(3):
        model, train, val = Net(), loader(4), loader(2)
        optimizer = sgd(model)
        watch({"model": model}, {"train": train, "val": val})
        truth.train_on(model, optimizer, train)
        truth.evaluate_on(model, val)


@loop
def more_folds_than_models_have_names(watch: Watch) -> None:
    """A new model every fold: what those beyond the bound of names did is one series, and none of them is missed."""
    truth = watch.truth()
    for _ in range(30):
        model, train = Net(), loader(1)
        optimizer = sgd(model)
        watch(model, {"train": train})
        truth.train_on(model, optimizer, train)


@loop
def instrumented_twice(watch: Watch) -> None:
    """A second call on the same objects extends the session: nothing is timed twice."""
    model, train, val, truth = Net(), loader(4), loader(2), watch.truth(repeatable=False)
    optimizer = sgd(model)
    first = watch(model, {"train": train})
    second = watch(model, {"train": train, "val": val})
    assert second is first
    truth.train_on(model, optimizer, train)
    truth.evaluate_on(model, val)


@loop
def two_threads_train_two_models(watch: Watch) -> None:
    """Steps belong to their thread: asks and updates of one end nothing in the other."""
    truth, lock = watch.truth(threads=3), threading.Lock()
    models = {"left": Net(), "right": Net()}
    loaders = {"left": loader(12), "right": loader(8)}
    watch(models, loaders)

    threads = [
        threading.Thread(target=truth.train_in_a_thread, args=(lock, name, models[name], loaders[name]))
        for name in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@loop
def ctrl_c_in_mid_step(watch: Watch) -> None:
    """The user stops between backward and update: that step is left unfinished."""
    truth, (model, optimizer, train) = watch.training({"train": 6}, partial=1)
    try:
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.backward(truth.loss(model, batch))
            if i == 4:
                raise KeyboardInterrupt  # noqa: TRY301 - as if it came from outside
            truth.update_that_ends_a_step(optimizer)
    except KeyboardInterrupt:
        pass


@loop
def checkpoints_in_mid_group(watch: Watch) -> None:
    """A checkpoint suspends a step that has no update yet, and adds nothing to it."""
    truth, (model, optimizer, train) = watch.training({"train": 8})
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        if i % 3 == 0:
            with otel_train.checkpoint():
                copy.deepcopy(model.state_dict())
            truth.checkpoints += 1
        if i % 4 == 3:
            truth.update_that_ends_a_step(optimizer)


@loop
def copies_are_not_the_model(watch: Watch) -> None:
    """An averaged copy and a model read back from disk run beside the model; only the model is counted."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    average = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    restored = torch.load(file, weights_only=False)
    for batch in train:
        truth.batch("train")
        truth.learn(model, optimizer, batch)
        for other in (average, restored):
            with torch.no_grad():
                loss_of(other, batch)
        truth.step()
