"""Times the functions with which frameworks save checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from otel_train.errors import imported
from otel_train.instrumentation.stages import Checkpoint
from otel_train.safety import replace

SAVES: Final = (
    ("accelerate.accelerator", "Accelerator.save_state"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.save_checkpoint"),
    ("diffusers.models.modeling_utils", "ModelMixin.save_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline.save_pretrained"),
    ("fastai.learner", "Learner.save"),
    ("ignite.handlers.checkpoint", "DiskSaver.__call__"),
    ("lightning.fabric.fabric", "Fabric.save"),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint"),
    ("lightning_fabric.fabric", "Fabric.save"),
    ("peft.peft_model", "PeftModel.save_pretrained"),
    ("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint"),
    ("skorch.callbacks.training", "Checkpoint.save_model"),
    ("skorch.net", "NeuralNet.save_params"),
    ("speechbrain.utils.checkpoints", "Checkpointer.save_checkpoint"),
    ("stable_baselines3.common.base_class", "BaseAlgorithm.save"),
    ("timm.utils.checkpoint_saver", "CheckpointSaver.save_checkpoint"),
    ("timm.utils.checkpoint_saver", "CheckpointSaver.save_recovery"),
    ("torch.distributed.checkpoint", "async_save"),
    ("torch.distributed.checkpoint", "save"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    ("transformers.trainer", "Trainer._save_checkpoint"),  # with the optimizer; no public method saves both
    ("transformers.trainer", "Trainer.save_model"),
    ("ultralytics.engine.trainer", "BaseTrainer.save_model"),
)
"""Modules, and their functions that save. A call inside another one belongs to the same checkpoint."""


class CheckpointProbe:
    """Times the functions in ``SAVES`` of modules that the program has imported."""

    def __init__(self) -> None:
        self._undo: dict[tuple[str, str], Callable[[], None]] = {}

    def watch(self) -> None:
        """Instruments what was imported since the last call. A function that a version lacks is left out."""
        for module, path in SAVES:
            if (module, path) in self._undo or (found := imported(module)) is None:
                continue
            outer, _, name = path.rpartition(".")
            owner = getattr(found, outer, None) if outer else found
            if callable(getattr(owner, name, None)):
                self._undo[module, path] = replace(owner, name, _timed)

    def remove(self) -> None:
        """Puts the functions back, unless other code has wrapped ours."""
        undo, self._undo = self._undo, {}
        for each in list(undo.values()):  # another thread may be in ``watch``
            each()


def _timed(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Checkpoint():
            return save(*args, **kwargs)

    return timed
