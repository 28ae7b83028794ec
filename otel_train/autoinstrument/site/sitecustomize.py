"""Runs at Python start below ``otel-train run``: waits for the import of torch or JAX.

Python imports a ``sitecustomize`` before the program. This one takes its folder out of ``sys.path`` again and
lets the user's own, if there is one, run in its place. Nothing is imported that Python has not loaded already.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = __file__.rpartition(os.sep)[0]
_PACKAGE = _HERE.rsplit(os.sep, maxsplit=2)[0]


class WhenImported:
    """Import finder that calls a function after torch or JAX has been imported; delegates everything else."""

    def __init__(self) -> None:
        self._awaited = {"torch", "jax"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a module, as the import system asks for it."""
        if name not in self._awaited:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(name, spec.loader)
                return spec
        return None

    def _follow(self, name: str, loader: Any) -> None:
        if not (hasattr(loader, "exec_module") and hasattr(loader, "__dict__")):
            return
        inner = loader.exec_module

        def exec_module(module: Any) -> None:
            self._awaited.discard(name)
            if not self._awaited and self in sys.meta_path:
                sys.meta_path.remove(self)
            del loader.exec_module
            inner(module)
            _observe(name)

        loader.exec_module = exec_module


def _observe(package: str) -> None:
    try:
        _find_otel_train()
        from otel_train.autoinstrument.attach import begin

        begin(package)
    except Exception as error:  # noqa: BLE001 - the program must run, with us or without
        sys.stderr.write(
            f"otel_train: {type(error).__name__}: {error}; the program runs without instrumentation\n"
        )


def _find_otel_train() -> None:
    """Adds the launcher's import path of otel_train if it is not importable, as in a checkout."""
    if "otel_train" in sys.modules or find_spec("otel_train") is not None:
        return
    spec = spec_from_file_location("otel_train", f"{_PACKAGE}/__init__.py")
    if spec is not None and spec.loader is not None:
        package = sys.modules["otel_train"] = module_from_spec(spec)
        spec.loader.exec_module(package)


def _run_the_users_own() -> None:
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if entry != _HERE]
if os.environ.get("OTEL_TRAIN_LAUNCH"):
    sys.meta_path.insert(0, WhenImported())
_run_the_users_own()
