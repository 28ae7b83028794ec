"""Loops of several threads: a step belongs to the thread that runs its forwards, and the run's time to the one that trains."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import otel_train
from tests.integration.loops.truth import (
    EVAL,
    TRAIN_ALONE,
    Net,
    Watch,
    loader,
    loop,
    loss_of,
    sgd,
    timed,
)


def in_a_thread(work: Callable[..., object], *arguments: Any) -> None:
    """Run it in a new thread, to its end."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


@timed
def a_thread_trains_after_the_main_thread_looked(watch: Watch) -> None:
    """The main thread tries the model on some rows, then waits for a thread that trains it: that one's time is the run's."""
    truth, (model, optimizer, train) = watch.slow_training(
        {"train": 8}, takes_s=0.0, threads=2, rated=TRAIN_ALONE
    )
    row = torch.zeros(1, 4)
    with torch.no_grad():
        truth.at(EVAL)
        truth.forward(EVAL)
        model(row)
    truth.step(EVAL)
    truth.sleep(0.08, "init")
    model.takes_s = 0.01
    in_a_thread(truth.train_on, model, optimizer, train)


@loop
def a_new_thread_every_epoch(watch: Watch) -> None:
    """The thread of the first epoch ends; the next one goes on with its steps."""
    truth = watch.truth(threads=2)
    model, train = Net(), loader(5)
    optimizer = sgd(model)
    watch(model, {"train": train})
    for _ in range(3):
        in_a_thread(truth.train_on, model, optimizer, train)


@loop
def the_main_thread_evaluates_while_threads_train(watch: Watch) -> None:
    """Two threads train a model each; what the main thread does beside them is evaluation."""
    truth = watch.truth(threads=3)
    models: dict[str, nn.Module] = {"left": Net(), "right": Net()}
    loaders, val = {name: loader(6) for name in models}, loader(3)
    watch(models, {**loaders, "val": val})
    lock = threading.Lock()

    threads = [
        threading.Thread(target=truth.train_in_a_thread, args=(lock, name, models[name], loaders[name]))
        for name in models
    ]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        for batch in val:
            loss_of(models["left"], batch)
            with lock:
                truth.batch("val")
                truth.forward(EVAL, "left")
                truth.step(EVAL)
    for thread in threads:
        thread.join()


@loop
def backward_in_another_thread(watch: Watch) -> None:
    """A pool runs the backwards: they are a part of the steps of the thread that runs the forwards."""
    truth = watch.truth(threads=2)
    model, train = Net(), loader(6)
    optimizer = sgd(model)
    watch(model, {"train": train})
    with ThreadPoolExecutor(1) as pool:
        for batch in train:
            truth.batch("train")
            loss = truth.loss(model, batch)
            truth.backward()
            pool.submit(loss.backward).result()
            truth.update_that_ends_a_step(optimizer)


@loop
def updates_in_another_thread(watch: Watch) -> None:
    """A pool runs the updates, as optimizers do that are overlapped with the step: backwards count the steps."""
    truth = watch.truth(threads=2, source="backward")
    model, train = Net(), loader(12)
    optimizer = sgd(model)
    watch(model, {"train": train})
    with ThreadPoolExecutor(1) as pool:
        for batch in train:
            truth.batch("train")
            optimizer.zero_grad()
            truth.backward(truth.loss(model, batch))
            pool.submit(optimizer.step).result()
            truth.update()
            truth.step()


@loop
def gradients_of_copies_are_applied_by_the_main_thread(watch: Watch) -> None:
    """A parameter server: threads make gradients of copies of its model; its updates are a part of their steps."""
    truth = watch.truth(threads=3, source="backward", repeatable=False)
    model = Net()
    copies: dict[str, nn.Module] = {name: copy.deepcopy(model) for name in ("left", "right")}
    optimizer, loaders = sgd(model), {name: loader(6) for name in copies}
    watch(copies, loaders)
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work(name: str) -> None:
        for batch in loaders[name]:
            loss = loss_of(copies[name], batch)
            made.put((name, torch.autograd.grad(loss, list(copies[name].parameters()))))

    threads = [threading.Thread(target=work, args=(name,)) for name in loaders]
    for thread in threads:
        thread.start()
    for _ in range(12):
        name, gradients = made.get()
        truth.batch(name)
        truth.forward(model=name)
        truth.backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        truth.update_that_ends_a_step(optimizer)
    for thread in threads:
        thread.join()


@loop
def halves_of_a_batch_in_threads(watch: Watch) -> None:
    """Manual data parallelism: the main thread reads and updates, threads make the gradients. Its updates are the steps."""
    truth = watch.truth(threads=3, repeatable=False)
    model, train, lock = Net(), loader(6), threading.Lock()
    optimizer = sgd(model)
    watch(model, {"train": train})

    def half(rows: list[torch.Tensor]) -> None:
        with lock:
            truth.backward(truth.loss(model, rows))

    with ThreadPoolExecutor(2) as pool:
        for inputs, targets in train:
            truth.batch("train")
            list(pool.map(half, [[inputs[n::2], targets[n::2]] for n in range(2)]))
            truth.update_that_ends_a_step(optimizer)


@loop
def steps_marked_in_another_thread(watch: Watch) -> None:
    """No model that can be seen: a thread works in stages, and says where its steps end."""
    truth = watch.truth(source="manual", threads=2)
    watch()

    def work() -> None:
        for _ in range(6):
            truth.stages["simulate"] += 1
            with otel_train.stage("simulate"):
                sum(range(1000))
            otel_train.step()
            truth.step()

    in_a_thread(work)


@timed
def threads_that_train_and_evaluate_in_turn(watch: Watch) -> None:
    """Each goes on with the time of the one before, also where the agent reads both at once; a pause between them is of no phase."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 4, "val": 2}, threads=2)

    def epoch() -> None:
        truth.train_on(model, optimizer, train)
        truth.evaluate_on(model, val)
        truth.sleep(0.1, "outside")

    for _ in range(3):
        in_a_thread(epoch)
        truth.sleep(0.1, "outside")


@timed
def the_main_thread_evaluates_between_epochs_of_a_thread(watch: Watch) -> None:
    """An executor runs the epochs, and its thread waits while the main thread evaluates: that time is of the evaluation."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 4, "val": 3}, threads=2)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(truth.train_on, model, optimizer, train).result()
            truth.sleep(0.1, "outside")
            truth.evaluate_on(model, val)


@timed
def the_main_thread_evaluates_before_a_thread_trains(watch: Watch) -> None:
    """Until the thread begins, the time of the run is that of the main thread."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 5, "val": 3}, threads=2)
    truth.evaluate_on(model, val)
    in_a_thread(truth.train_on, model, optimizer, train)
