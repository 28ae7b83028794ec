"""Import a package that is not required, or say which extra has it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from otel_train.errors import MissingExtraError

if TYPE_CHECKING:
    from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module``, or say which extra provides it.

    Args:
        module: dotted name of the module.
        extra: the extra of otel-train that installs it.

    Raises:
        MissingExtraError: ``module`` itself is absent. A failure *inside* it, such as a broken CUDA
            build, is left alone: the real message is worth more than ours.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtraError(
            f"{module} is not installed. Run: pip install 'otel-train[{extra}]'", name=module
        ) from error
