"""torchdata's nodes: a pipeline that is no DataLoader, batched and mapped; what the loop reads comes from the session."""

from __future__ import annotations

import torch
from torch import nn
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper

from tests.integration.frameworks.watching import begin, end


def main() -> None:
    torch.manual_seed(0)
    rows = [(torch.randn(4), torch.tensor(n % 2)) for n in range(40)]
    node = Batcher(IterableWrapper(rows), batch_size=4)
    node = Mapper(node, lambda batch: tuple(torch.stack(column) for column in zip(*batch, strict=True)))
    loader = Loader(node)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin({"model": model}, {"train": loader})
    batches = 0
    for _ in range(2):
        for x, y in session.loaders["train"] if session else loader:
            batches += 1
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    end(model, steps=20, batches=batches)


if __name__ == "__main__":
    main()
