"""A model that trains a few steps, then says that it is done and what came of it."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train

torch.manual_seed(0)
torch.set_num_threads(1)
steps = int(sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(steps, 4)), batch_size=1)
if "--bare" not in sys.argv:
    otel_train.instrument(model, {"train": loader})
for (batch,) in loader:
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
sys.stdout.write(f"{loss.item():.9f} {time.time():.3f}\n")
sys.stdout.flush()
