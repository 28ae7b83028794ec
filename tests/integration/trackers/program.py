"""A program that logs to one tracker, bare or instrumented: ``program.py TRACKER FOLDER instrumented|bare [SETTINGS]``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train

Log = Callable[[int, float], None]


@contextlib.contextmanager
def wandb_log(folder: Path) -> Iterator[Log]:
    """Rows without a step, then rows with one."""
    import wandb

    run = wandb.init(mode="offline", dir=folder, project="test")

    def log(number: int, loss: float) -> None:
        wandb.log({"loss": loss}, step=None if number < 30 else 100 + number)

    yield log
    run.finish()


def mlflow_file_log(folder: Path) -> contextlib.AbstractContextManager[Log]:
    """A folder of files, as earlier versions write by default."""
    return mlflow_log(f"file://{folder}/mlruns")


def mlflow_sqlite_log(folder: Path) -> contextlib.AbstractContextManager[Log]:
    """A database, as later ones do."""
    return mlflow_log(f"sqlite:///{folder}/mlflow.db")


@contextlib.contextmanager
def mlflow_log(address: str) -> Iterator[Log]:
    """Metrics into the active run of the training thread."""
    import mlflow

    mlflow.set_tracking_uri(address)
    with mlflow.start_run():
        yield lambda number, loss: mlflow.log_metric("loss", loss, step=number)


@contextlib.contextmanager
def tensorboard_log(folder: Path) -> Iterator[Log]:
    """Scalars of the program's own writer."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "own")) as writer:
        yield lambda number, loss: writer.add_scalar("loss", loss, number)


def main(tracker: str, folder: Path, *, instrumented: bool, settings: dict[str, Any]) -> None:
    """Train 3 epochs of 20 steps; print a hash of the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(80, 4), torch.randn(80, 2)), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.ExitStack() as stack:
        if instrumented:
            stack.enter_context(
                otel_train.instrument(
                    model,
                    loader,
                    run_dir=str(folder / "runs"),
                    run_id="r",
                    prometheus=False,
                    console=False,
                    tuning={"poll_interval_s": 0.02},
                    log_every_steps=10,
                    **settings,
                )
            )
        log = stack.enter_context(LOGS[tracker](folder))
        number = 0
        for epoch in range(3):
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                log(number, loss.item())
                number += 1
            if instrumented and epoch < 2:
                otel_train.summary()  # accounts all events: these rows are written one by one, the rest at the end of the run
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    sys.stdout.write(json.dumps({"weights": hashlib.sha256(weights).hexdigest()}) + "\n")


LOGS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Log]]] = {
    "wandb": wandb_log, "mlflow-file": mlflow_file_log, "mlflow-sqlite": mlflow_sqlite_log,
    "tensorboard": tensorboard_log,
}  # fmt: skip

if __name__ == "__main__":
    main(
        sys.argv[1], Path(sys.argv[2]), instrumented=sys.argv[3] == "instrumented",
        settings=json.loads(sys.argv[4]) if len(sys.argv) > 4 else {},
    )  # fmt: skip
