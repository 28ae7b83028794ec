"""Small models in training, each with the trouble that the command line asks for, until they are ended.

Each argument is a JSON object with the environment and the options of one run. All of them are forked from one process,
which imports torch once, and the last line of its output names their process ids.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import otel_train


class Slow(Dataset[torch.Tensor]):
    """Each sample takes its time."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return torch.ones(8) * (index % 7)


def train(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait-ms", type=float, default=1.0, help="of a batch")
    parser.add_argument("--work-ms", type=float, default=20.0, help="of a step, beside the model")
    parser.add_argument("--trouble", choices=["none", "stall", "nan"], default="none")
    parser.add_argument("--after-s", type=float, default=8.0, help="when the trouble begins")
    parser.add_argument("--setting", action="append", default=[], help="NAME=VALUE, of this run alone")
    options = parser.parse_args(words)
    for setting in options.setting:
        name, _, text = setting.partition("=")
        os.environ[f"OTEL_TRAIN_{name}"] = text
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(Slow(options.wait_ms / 1000), batch_size=1)
    otel_train.instrument(model, {"train": loader})
    began_s = time.monotonic()
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        with otel_train.stage("work"):
            time.sleep(options.work_ms / 1000)
        optimizer.step()
        optimizer.zero_grad()
        troubled = time.monotonic() - began_s > options.after_s
        if troubled and options.trouble == "stall":
            time.sleep(3600)
        otel_train.log(loss=float("nan") if troubled and options.trouble == "nan" else loss)


def main() -> None:
    pids = {}
    for text in sys.argv[1:]:
        run = json.loads(text)
        pid = os.fork()
        if not pid:
            os.environ.update(run["environ"])
            train(run["options"])
            return
        pids[run["environ"]["OTEL_TRAIN_RUN_ID"]] = pid
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    for pid in pids.values():
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
