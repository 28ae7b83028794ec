"""accelerate's quick tour: ``prepare``, ``accumulate``, ``backward``, on random rows."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.frameworks.watching import begin, end


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training_dataloader = DataLoader(
        TensorDataset(torch.randn(40, 8), torch.randint(0, 2, (40,))), batch_size=4
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    begin({"model": model}, {"train": training_dataloader})
    steps = 0
    for _ in range(2):
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    end(accelerator.unwrap_model(model), steps=steps)


if __name__ == "__main__":
    main()
