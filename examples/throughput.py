"""Samples and batches per second, load and transform times, memory and efficiency of every epoch.

    pip install 'otel-train[mlflow]'
    python examples/throughput.py

The block [Throughput] is printed after every epoch; the active MLflow run gets the same values.
"""

import time

import mlflow
import torch
from torch.utils.data import DataLoader, Dataset

import otel_train


class Images(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.001)  # decoding and augmenting
        return torch.full((32,), float(index)), index % 10


def main():
    model = torch.nn.Linear(32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Images(), batch_size=16, num_workers=2, shuffle=True)

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    with mlflow.start_run():
        session = otel_train.instrument(model, {"train": loader}, console_metrics=["throughput"])
        kept = torch.zeros(320, 32)  # what the program keeps of its data, in bytes when asked
        session.cache("kept", size=lambda: kept.nbytes)
        for _ in range(3):
            for inputs, labels in loader:
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        session.close()


if __name__ == "__main__":
    main()
