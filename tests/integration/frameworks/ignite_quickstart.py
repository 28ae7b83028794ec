"""PyTorch-Ignite's quick start: a trainer, evaluators, handlers, on random digits."""

from __future__ import annotations

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.frameworks.watching import begin, end


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.model(x)


def digits(rows: int) -> TensorDataset:
    return TensorDataset(torch.rand(rows, 1, 8, 8), torch.randint(0, 10, (rows,)))


def main() -> None:
    torch.manual_seed(0)
    train_loader = DataLoader(digits(40), batch_size=4, shuffle=True)
    val_loader = DataLoader(digits(16), batch_size=8)
    model = Net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    val_metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
    train_evaluator = create_supervised_evaluator(model, metrics=val_metrics)
    val_evaluator = create_supervised_evaluator(model, metrics=val_metrics)

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_training_results(trainer):
        train_evaluator.run(train_loader)

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_validation_results(trainer):
        val_evaluator.run(val_loader)

    begin({"net": model}, {"train": train_loader, "val": val_loader})
    trainer.run(train_loader, max_epochs=2)
    end(model, steps=trainer.state.iteration, evals=2 * (len(train_loader) + len(val_loader)))


if __name__ == "__main__":
    main()
