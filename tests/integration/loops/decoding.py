"""A dataset that does in a worker what is recorded in a training process."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader, Dataset

import otel_train


class Decoded(Dataset[tuple[torch.Tensor, int, int]]):
    """Rows that take a user stage, a loader and a backward to make; the third value is the process.

    Args:
        rows: how many.
        updates: an optimizer takes part too: where torch is new to the process, it loads for seconds.
    """

    def __init__(self, rows: int, *, updates: bool = False) -> None:
        self.rows = rows
        self.updates = updates

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        weight = torch.ones(4, requires_grad=True)
        with otel_train.stage("decode"):
            for part in DataLoader([torch.randn(4), torch.randn(4)]):
                (weight * part).sum().backward()
        if self.updates:
            torch.optim.SGD([weight], lr=0.1).step()
        return weight.detach(), index % 2, os.getpid()
