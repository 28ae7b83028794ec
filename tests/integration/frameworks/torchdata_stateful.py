"""torchdata's ``StatefulDataLoader``: an epoch is broken off, its state taken, and the rest trained from that."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.frameworks.watching import begin, end


def main() -> None:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    dataloader = StatefulDataLoader(dataset, batch_size=4, num_workers=0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin({"model": model}, {"train": dataloader})

    def train(batches, most):
        for number, (x, y) in enumerate(batches, 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if number == most:
                return

    train(dataloader, 4)
    state_dict = dataloader.state_dict()
    dataloader.load_state_dict(state_dict)
    train(dataloader, 100)
    end(model, steps=10)


if __name__ == "__main__":
    main()
