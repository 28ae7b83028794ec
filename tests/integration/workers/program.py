"""A training whose guests must stay silent: ``program.py fork|spawn|forkserver|child FOLDER``; says what it knows."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import otel_train
from tests.integration.loops.decoding import Decoded
from tests.integration.loops.truth import Net, Truth, sgd

EPOCHS = 3


def with_workers(context: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Three epochs over a loader with workers, each of which trains a little itself."""
    start = multiprocessing.get_context(context)
    if context == "forkserver":
        start.set_forkserver_preload(["torch"])  # else every worker imports it anew
    number = 1 if context == "spawn" else 2
    model, truth = Net(), Truth()
    rows = Decoded(12, updates=context == "fork")
    train = DataLoader(rows, batch_size=4, num_workers=number, multiprocessing_context=start)
    optimizer = sgd(model)
    session = otel_train.instrument(model, {"train": train}, **settings)
    workers: set[int] = set()
    for _ in range(EPOCHS):
        for x, y, pids in train:
            workers.update(pids.tolist())
            truth.batch("train", len(x))
            truth.learn(model, optimizer, (x, y))
            truth.step()
    time.sleep(0.5)  # several exports, not the last one alone
    session.close()
    return {"workers": sorted(workers), "expected_workers": number * EPOCHS, **known(truth, session)}


def with_a_child(settings: dict[str, Any]) -> dict[str, Any]:
    """A fork in mid-run trains as well, and closes the session it was born with."""
    model, truth = Net(), Truth()
    train = DataLoader(Decoded(8, updates=True), batch_size=4)
    optimizer = sgd(model)
    session = otel_train.instrument(model, {"train": train}, **settings)
    batches = [(x, y) for x, y, _ in train]
    inner = session.summary()["updates"] or 0
    child = os.fork()
    if not child:
        try:
            for batch in batches * 5:
                Truth().learn(model, optimizer, batch)
            session.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    for batch in batches:
        truth.learn(model, optimizer, batch)
    session.close()
    return {"status": status, "inner": inner, **known(truth, session)}


def known(truth: Truth, session: otel_train.Session) -> dict[str, Any]:
    """What the program counted itself, and what was counted of it."""
    return {
        "pid": os.getpid(), "batches": dict(truth.batches), "steps": dict(truth.steps), "updates": truth.updates,
        "forwards": truth.forwards["model", "train"], "summary": session.summary(),
    }  # fmt: skip


if __name__ == "__main__":
    how = sys.argv[1]
    quiet = {
        "run_dir": str(Path(sys.argv[2])), "prometheus": False, "console": False,
        "export_interval_s": 0.1, "tuning": {"poll_interval_s": 0.02},
    }  # fmt: skip
    said = with_a_child(quiet) if how == "child" else with_workers(how, quiet)
    sys.stdout.write(json.dumps(said) + "\n")
