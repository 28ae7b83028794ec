"""Two processes train one shared model without locks. Run as a program; each child writes what it counted.

With a second argument ``bare`` it runs without otel_train.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from tests.integration.loops.truth import Net, NoSession, Truth, Watch, loader, sgd
from tests.support.loop_table import counted

UPDATES = 6


def train(number: int, model: Net, folder: str, watch: Watch | NoSession) -> None:
    """One of the processes, as in torch's own example."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(number), "2"
    truth, batches = Truth(), loader(UPDATES)
    optimizer = sgd(model)
    watch(model, {"train": batches})
    for batch in batches:
        truth.batch("train")
        truth.learn(model, optimizer, batch)
        truth.step()
    said: dict[str, Any] = {"program": truth.counted()}
    if isinstance(watch, Watch):
        watch.close()
        summary = watch.sessions[-1].summary()
        said |= {"in_code": counted(summary), "faults": summary["telemetry"]["faults"]}
    (Path(folder) / f"child{number}.json").write_text(json.dumps(said), encoding="utf-8")


def main() -> None:
    """Share the model, start the processes, wait for them."""
    model = Net()
    model.share_memory()
    before = model.first.weight.detach().clone()
    folder, bare = sys.argv[1], sys.argv[2:] == ["bare"]
    watch = NoSession() if bare else Watch(Path(folder))
    multiprocessing.spawn(train, args=(model, folder, watch), nprocs=2)
    assert not torch.equal(before, model.first.weight), "the children trained a copy"


if __name__ == "__main__":
    main()
