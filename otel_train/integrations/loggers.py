"""The trackers that a Lightning Trainer logs to: what we log goes there, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.config import Config


def _mlflow_run(logger: Any) -> Any:
    # The logger's run is active on no thread, so nobody would find it.
    return logger.experiment.get_run(logger.run_id)


def _experiment(logger: Any) -> Any:
    return logger.experiment


_KINDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "MLFlowLogger": ("mlflow", _mlflow_run),
    "TensorBoardLogger": ("tensorboard", _experiment),
    "WandbLogger": ("wandb", _experiment),
}
"""Our setting and what it takes, by the class of the logger, which has one in each of the two packages."""


def trackers_of(trainer: Any, config: Config) -> dict[str, Any]:
    """Runs and writers of a Trainer's loggers, by our settings; of those settings that are left to us.

    Args:
        trainer: has its loggers' runs open by now.
        config: of the session.
    """
    found = {}
    for logger in trainer.loggers if trainer.is_global_zero else ():
        for kind in type(logger).__mro__:
            setting, run_of = _KINDS.get(kind.__name__, ("", _experiment))
            if setting and getattr(config, setting) == "auto" and setting not in found:
                found[setting] = run_of(logger)
    return found
