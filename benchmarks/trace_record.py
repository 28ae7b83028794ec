"""Records a real trace on the CPU; ``python -m benchmarks.trace_record FILE STEPS``."""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

LAYERS, WIDTH, BATCH = 60, 32, 8


def main() -> None:
    """Profiles a small model with many operators, with shapes and memory."""
    path, steps = sys.argv[1], int(sys.argv[2])
    layers = [
        part
        for _ in range(LAYERS)
        for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU())
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loader = DataLoader(TensorDataset(torch.randn((steps + 3) * BATCH, WIDTH)), batch_size=BATCH)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for (batch,) in loader:
            with record_function("otel_train:forward"):
                loss = model(batch).square().mean()
            with record_function("otel_train:backward"):
                loss.backward()
            with record_function("otel_train:optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()


if __name__ == "__main__":
    main()
