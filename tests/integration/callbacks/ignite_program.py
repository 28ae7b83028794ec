"""Ignite's quick start: a trainer, an evaluator that runs inside one of its handlers, and a checkpoint after each epoch."""

from __future__ import annotations

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.callbacks.telling import by_callback, folder, settings, tell, weights_hash


def digits(rows: int) -> TensorDataset:
    return TensorDataset(torch.rand(rows, 8), torch.randint(0, 3, (rows,)))


def main() -> None:
    torch.manual_seed(0)
    train_loader, val_loader = DataLoader(digits(40), batch_size=4), DataLoader(digits(16), batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 3))
    trainer = create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.CrossEntropyLoss()
    )
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})

    def validate(_: Engine) -> None:
        evaluator.run(val_loader)

    trainer.add_event_handler(Events.EPOCH_COMPLETED, validate)
    saver = Checkpoint({"model": model}, DiskSaver(str(folder() / "saved")))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if by_callback():
        from otel_train.integrations.ignite import OtelTrainHandler

        OtelTrainHandler(console_metrics=["throughput"], **settings("run")).attach(trainer)
    trainer.run(train_loader, max_epochs=2)
    tell({"steps": trainer.state.iteration, "evals": 4, "checkpoints": 2, "weights": weights_hash(model)})


if __name__ == "__main__":
    main()
