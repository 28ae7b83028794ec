"""Checkpoints that a Trainer saves, timed apart from the steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from otel_train import front

if TYPE_CHECKING:
    from collections.abc import Callable


def time_checkpoints(trainer: Any) -> Callable[[], None]:
    """Let ``trainer.save_checkpoint`` be a checkpoint of ours; what undoes that."""
    save = trainer.save_checkpoint

    @functools.wraps(save)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with front.checkpoint():
            return save(*args, **kwargs)

    def undo() -> None:
        if vars(trainer).get("save_checkpoint") is timed:
            del trainer.save_checkpoint

    trainer.save_checkpoint = timed
    return undo
