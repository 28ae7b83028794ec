"""Trains the demo's model with everything a laptop can feed a dashboard: values, checkpoints, captures and a worker.

    python -m tests.support.dashboard_run SECONDS RUN_DIRECTORY

The usual ``OTEL_*`` variables say where it sends.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch

import otel_train
from otel_train import demo

VALIDATE_EVERY = 25
CHECKPOINT_EVERY = 100
STEPS_PLANNED = 4_000
CAPTURE_EVERY_MIN = 0.4


def main(seconds: float, directory: Path) -> None:
    """Train until the time is up."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = demo.Transformer()
    loaders = demo.make_loaders(1)
    otel_train.instrument(
        model,
        loaders,
        run_id="real",
        run_dir=str(directory),
        total_steps=STEPS_PLANNED,
        checkpoint_every_s=60,
        export_interval_s=5,
        prometheus_address="127.0.0.1:0",
        profiler_every={"minutes": CAPTURE_EVERY_MIN},
        profiler_schedule="active=2",
        profiler_activities="cpu",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS_PLANNED)
    sources = [demo.forever(loaders["code"]), demo.forever(loaders["prose"])]
    end = time.monotonic() + seconds
    for step in itertools.count(1):
        losses = {}
        for name, source in zip(("code_loss", "prose_loss"), sources, strict=True):
            losses[name] = demo.loss_of(model, next(source), "cpu")
            (losses[name] / len(sources)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        otel_train.log(**losses, lr=decay.get_last_lr()[0], grad_norm=norm, tokens=2 * 16 * 64)
        if step % VALIDATE_EVERY == 0:
            otel_train.log(val_loss=demo.validate(model, loaders["val"], "cpu"))
        if step % CHECKPOINT_EVERY == 0:
            with otel_train.checkpoint():
                torch.save(model.state_dict(), directory / "model.pt")
        if time.monotonic() >= end:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
