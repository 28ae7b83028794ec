"""Averages, totals and counts of every operation, your own included, beside the rows that you log to W&B.

    pip install 'otel-train[wandb]'
    python examples/operations.py

They arrive in the run that the program opens, as profiling/augment_avg_time and so on. The program's own rows and
steps stay as they are.
"""

import torch
import wandb
from torch.utils.data import DataLoader, TensorDataset

import otel_train


@otel_train.stage("augment")
def augment(inputs):
    return inputs + 0.1 * torch.randn_like(inputs)


def main():
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(480, 16), torch.randn(480, 1)), batch_size=8)

    run = wandb.init(project="otel-train-examples")
    otel_train.instrument(model, {"train": loader}, console_metrics=["profiling"])
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(augment(inputs)), targets)
        loss.backward()
        with otel_train.stage("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss.item()})

    stages = otel_train.summary()["stages"]
    print({row["stage"]: row["count"] for row in stages if row["phase"] == "train"})
    otel_train.current().close()
    run.finish()


if __name__ == "__main__":
    main()
