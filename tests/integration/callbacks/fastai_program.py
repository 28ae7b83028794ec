"""fastai's Learner over loaders of its own; its optimizer is none of torch's."""

from __future__ import annotations

from typing import Any

import fastai.callback.progress  # noqa: F401 - gives Learner its no_bar
import torch
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch.utils.data import TensorDataset

from tests.integration.callbacks.telling import by_callback, folder, settings, tell, weights_hash


def digits(rows: int) -> TensorDataset:
    return TensorDataset(torch.rand(rows, 8), torch.randint(0, 3, (rows,)))


def callbacks() -> list[Any]:
    if not by_callback():
        return []
    from otel_train.integrations.fastai import OtelTrainCallback

    return [OtelTrainCallback(console_metrics=["throughput"], **settings("run"))]


def main() -> None:
    torch.manual_seed(0)
    loaders = DataLoaders(
        DataLoader(digits(40), bs=4), DataLoader(digits(16), bs=8), device=torch.device("cpu")
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 3))
    learn = Learner(loaders, model, loss_func=torch.nn.CrossEntropyLoss(), cbs=callbacks(), path=folder())
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, lr=0.01, cbs=SaveModelCallback(every_epoch=True))
    tell({"steps": 20, "evals": 4, "checkpoints": 2, "weights": weights_hash(model)})


if __name__ == "__main__":
    main()
