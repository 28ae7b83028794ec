"""A loop of accelerate's quick tour: ``prepare``, ``accumulate``, ``backward``, ``log``, ``save_state``."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.callbacks.telling import by_callback, folder, settings, tell, weights_hash


def trackers() -> list[Any]:
    if not by_callback():
        return []
    from otel_train.integrations.accelerate import OtelTrainTracker

    return [OtelTrainTracker(**settings("run"))]


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, log_with=trackers())
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(0, 2, (40,))), batch_size=4)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    accelerator.init_trackers("mine", config={"lr": 1e-2})
    steps = 0
    for _ in range(2):
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.detach(), "note": "text is no number"}, step=steps)
            steps += accelerator.sync_gradients
        accelerator.save_state(str(folder() / "state"))
    accelerator.end_training()
    weights = weights_hash(accelerator.unwrap_model(model))
    tell({"steps": steps, "evals": 0, "checkpoints": 2, "weights": weights})


if __name__ == "__main__":
    main()
