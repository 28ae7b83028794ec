"""A dataset that does in a worker what is recorded in a training process."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader, Dataset

import otel_train


class Decoded(Dataset[tuple[torch.Tensor, int, int]]):
    """Rows that take a stage by hand, a loader, a backward and an update to make; the third figure is the process."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        weight = torch.ones(4, requires_grad=True)
        with otel_train.stage("decode"):
            for part in DataLoader([torch.randn(4), torch.randn(4)]):  # type: ignore[arg-type]
                (weight * part).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
        return weight.detach(), index % 2, os.getpid()
