"""fastai's ``Learner`` over DataLoaders of its own: its optimizer is none of torch's."""

from __future__ import annotations

import fastai.callback.progress  # noqa: F401 - gives Learner its no_bar
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from torch import nn
from torch.utils.data import TensorDataset

from tests.integration.frameworks.watching import begin, end


def digits(rows: int) -> TensorDataset:
    return TensorDataset(torch.rand(rows, 64), torch.randint(0, 10, (rows,)))


def main() -> None:
    torch.manual_seed(0)
    train, valid = DataLoader(digits(40), bs=4), DataLoader(digits(16), bs=8)
    dls = DataLoaders(train, valid, device=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    begin({"model": model})
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, lr=0.01)
    end(model, steps=2 * 10, evals=2 * 2)


if __name__ == "__main__":
    main()
