"""Runs when Python starts anywhere below ``otel-train run``: waits for torch, and else does nothing.

Python imports a ``sitecustomize`` before the program. This one takes its folder out of ``sys.path`` again and
lets the user's own, if there is one, run in its place. Nothing is imported that Python has not loaded already.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not loaded yet
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH120 - as above


class WhenTorchComes:
    """A finder that finds what the others find, and has something done once torch has been imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As the import system asks for it."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec: ModuleSpec | None = None if finder is self else finder.find_spec(name, path, target)  # type: ignore[arg-type]  # as handed over
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: object) -> None:
        if type(loader) is not SourceFileLoader:
            return
        inner = loader.exec_module

        def exec_module(module: object) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            del loader.exec_module
            inner(module)  # type: ignore[arg-type]  # a module, as handed over
            _observe()

        loader.exec_module = exec_module  # type: ignore[method-assign]  # gone when it has been called once


def _observe() -> None:
    try:
        _find_otel_train()
        from otel_train.launch.child import begin

        begin()
    except Exception as error:  # noqa: BLE001 - the program must run, with us or without
        print(f"otel_train: {type(error).__name__}: {error}; the program runs unobserved", file=sys.stderr)  # noqa: T201 - nothing to log with yet


def _find_otel_train() -> None:
    """Make the package importable where it only was so for who started us: run from its sources, say."""
    if "otel_train" in sys.modules or PathFinder.find_spec("otel_train") is not None:
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
    sys.meta_path.insert(0, WhenTorchComes())  # type: ignore[arg-type]  # all that is asked of a finder
_run_the_users_own()
