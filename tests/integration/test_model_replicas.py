"""Which ranks count samples, by the process groups of a real mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, json
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from otel_train.config import Config
from otel_train.resource import detect

def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=4)
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    info = detect(Config(run_id="r"), {"RANK": str(number), "WORLD_SIZE": "4"})
    open(f"{folder}/{number}.json", "w").write(json.dumps([info.dp_leader, info.replica_ranks]))
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(rank, args=(sys.argv[1],), nprocs=4)
"""


def test_of_the_ranks_of_a_tensor_parallel_group_one_counts(tmp_path: Path) -> None:
    """They work on the same samples: two by two, half of the four ranks count."""
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, str(tmp_path / "program.py"), str(tmp_path)], check=True, timeout=120)

    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)] == [
        [True, 2],
        [False, 2],
        [True, 2],
        [False, 2],
    ]
