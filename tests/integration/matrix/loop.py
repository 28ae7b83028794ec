"""A compiled, AMP-scaled loop with workers and an evaluation. Arguments: ``bare`` or ``instrumented``, and a folder for runs.

Prints, as JSON, versions of torch and Python, a hash of the weights it ends with, and what was counted.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

INSTRUMENTED = sys.argv[1] == "instrumented"


def main() -> None:
    """Train for two epochs of 12 steps, each followed by an evaluation of 3 batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    rows, labels = torch.randn(48, 8), torch.randint(0, 4, (48,))
    train = DataLoader(TensorDataset(rows, labels), batch_size=4, shuffle=True, num_workers=2)
    val = DataLoader(TensorDataset(rows[:12], labels[:12]), batch_size=4)
    session = None
    if INSTRUMENTED:
        import otel_train

        session = otel_train.instrument(
            model, {"train": train, "val": val}, run_dir=sys.argv[2], prometheus=False, console=False
        )
    step = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for _ in range(2):
        model.train()
        for inputs, targets in train:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(step(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad():
            for inputs, _ in val:
                step(inputs)
    sha256 = hashlib.sha256()
    for parameter in model.parameters():
        sha256.update(parameter.detach().numpy().tobytes())
    result = {
        "torch": torch.__version__,
        "python": "{}.{}".format(*sys.version_info),
        "weights": sha256.hexdigest(),
    }
    if session is not None:
        session.close()
        summary = session.summary()
        result["steps"] = summary["steps"]
        result["faults"] = summary["telemetry"]["faults"]
        result["calls"] = {
            f"{row['phase']}/{row['stage']}": row["count"] for row in summary["stages"] if row.get("count")
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
