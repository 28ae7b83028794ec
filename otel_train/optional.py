"""Packages that are not required: import one, or find one that the program has imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_train.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping
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


def imported(
    module: str, modules: Mapping[str, Any] = sys.modules
) -> Any:  # Any: what a module has is its own
    """``module`` if the program has imported it; None until the import is over.

    Another thread may import it at this moment: it is in ``sys.modules`` then, and lacks most of its names.

    Args:
        module: dotted name of the module.
        modules: what is looked in.
    """
    found = modules.get(module)
    return None if getattr(getattr(found, "__spec__", None), "_initializing", False) else found
