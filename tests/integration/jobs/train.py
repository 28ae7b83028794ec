"""A job of several gloo ranks that sleeps where its options say: ``python train.py RUNS OPTIONS-AS-JSON``.

Without ``RANK`` in its environment it forks the ranks itself, with torch imported once for all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, which takes seconds: once before the fork
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import otel_train
from otel_train import session as _session  # noqa: F401 - imported before the fork


def fork_ranks(runs: Path) -> None:
    """Come back in every rank; the parent writes down how each ends."""
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(runs / f"{name}{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
            return
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        (runs / f"code{ranks.pop(pid)}").write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


if "RANK" not in os.environ:
    fork_ranks(Path(sys.argv[1]))

OPTIONS: dict[str, Any] = {
    "steps": 40,
    "bare": False,
    "rank": 1,  # of which the next ones speak
    "slow_s": {},  # seconds to sleep in a stage of every step
    "hang_at": -1,  # step in which it hangs
    "hang_in": "data",
    "kill_at": -1,
    "stop_at": -1,
    "eval_every": 0,  # steps between two evaluations
    "settings": {},
    "group_first": True,
} | json.loads(sys.argv[2])
RANK = int(os.environ["RANK"])
MINE = OPTIONS["rank"] == RANK
SLOW_S: dict[str, float] = OPTIONS["slow_s"] if MINE else {}
STEP_S = 0.005


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Synthetic rows; reading the first of a batch takes a given time."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(number, 4, generator=generator)
        self.y = torch.randint(0, 2, (number,), generator=generator)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reads % 2 == 0:
            time.sleep(SLOW_S.get("data", 0.0))
            hang("data", self.reads // 2)
        self.reads += 1
        return self.x[index], self.y[index]


class Net(torch.nn.Linear):
    """A linear layer whose forward takes a while."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S + SLOW_S.get("forward", 0.0))
        if self.training:
            hang("forward", self.calls)
            self.calls += 1
        return super().forward(x)


def say(*words: object) -> None:
    """Where the test reads it."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def hang(stage: str, step: int) -> None:
    """Never come back, if this is the place."""
    if MINE and OPTIONS["hang_in"] == stage and step == OPTIONS["hang_at"]:
        say("hangs", time.time())
        time.sleep(600)


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    session: Any = contextlib.nullcontext()
    if OPTIONS["group_first"]:
        dist.init_process_group("gloo")
    if not OPTIONS["bare"]:
        session = otel_train.instrument(run_dir=sys.argv[1], **({"prometheus": False} | OPTIONS["settings"]))
    if not OPTIONS["group_first"]:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    rows = Rows(OPTIONS["steps"] * 2 * world)
    model = DistributedDataParallel(Net(4, 2))
    train = DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows, shuffle=False))
    val = DataLoader(Rows(8), batch_size=2)
    if not OPTIONS["bare"]:
        session.add(model, {"train": train, "val": val})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with session:
        for step, (x, y) in enumerate(train):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(SLOW_S.get("other", 0.0))
            hang("other", step)
            ends(step)
            if MINE and OPTIONS["eval_every"] and step % OPTIONS["eval_every"] == 0:
                evaluate(model.module, val)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        say("weights", hashlib.sha256(weights).hexdigest())
        Path(sys.argv[1], f"trained{RANK}").touch()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    dist.barrier()
    say("left", [store.check([f"otel_train/0/{rank}"]) for rank in range(world)])
    dist.barrier()
    dist.destroy_process_group()


def ends(step: int) -> None:
    """Die, or stand still as a whole, if this is the step."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if MINE and step == OPTIONS["kill_at"] and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if MINE and step == OPTIONS["stop_at"]:
        say("hangs", time.time())
        os.kill(os.getpid(), signal.SIGSTOP)


@torch.no_grad()
def evaluate(model: torch.nn.Module, val: Any) -> None:
    """One pass."""
    model.eval()
    for x, _ in val:
        model(x)
        time.sleep(0.03)
    model.train()


main()
