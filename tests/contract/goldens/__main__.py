"""Runs the loops on the frozen machine and writes what they say: ``python -m tests.contract.goldens FOLDER [LOOP ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from tests.contract.goldens.machine import freeze

    freeze()  # before otel_train is imported

    from tests.contract.goldens.run import LOOPS, write

    folder, *names = sys.argv[1:]
    for name in names or LOOPS:
        write(name, Path(folder))
