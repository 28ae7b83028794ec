"""What a program under test says at its end, and how it is observed: by a callback, or not at all by itself."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HOW, FOLDER = "TEST_OBSERVED_BY", "TEST_FOLDER"
"""Environment: ``callback`` or ``nothing``, and where to leave things."""


def by_callback() -> bool:
    return os.environ[HOW] == "callback"


def folder() -> Path:
    return Path(os.environ[FOLDER])


def settings(name: str) -> dict[str, Any]:
    """Settings of a callback that keep a test quiet, with a run directory below ``name``."""
    return {
        "run_dir": str(folder() / name / "runs"),
        "prometheus": False,
        "console": False,
        "otlp": "off",
        "flight_recorder_events": 16384,
    }


def weights_hash(model: torch.nn.Module) -> str:
    """What a model has learnt."""
    found = hashlib.sha256()
    for weight in model.state_dict().values():
        found.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def tell(said: dict[str, Any]) -> None:
    (folder() / "said.json").write_text(json.dumps(said), encoding="utf-8")
