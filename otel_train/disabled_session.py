"""A session that does nothing: ``OTEL_TRAIN_DISABLED=true``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from otel_train.errors import ConfigError
from otel_train.handle import Handle
from otel_train.instrumentation.naming import named_loaders
from otel_train.instrumentation.timers import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.config import Config
    from otel_train.profiler.setup import NoEpochCaptures


class DisabledSession:
    """Has what a ``Session`` has, and leaves everything as it is.

    Args:
        config: says that it is disabled; None where it is not known what it says.
        loaders: as for ``instrument``.
    """

    closed = False
    info = None
    run_directory = None
    metrics_url = None
    last_loader_name = None
    last_batch_fetch_ms = None

    def __init__(self, config: Config | None, loaders: Any) -> None:  # Any: the user's own
        self.config = config
        self.loaders: dict[str, Any] = {}
        self.add(loaders=loaders)

    def add(self, model: Any = None, loaders: Any = None) -> None:  # Any: see ``instrument``
        """Let ``loaders`` have them by name, as they are."""
        del model
        with suppress(ConfigError):  # of what is wrong nothing comes
            self.loaders.update({entry.name: entry.loader for entry in named_loaders(loaders)})

    def unobserved(self) -> list[dict[str, str]]:
        """Nothing was to be observed."""
        return []

    def watch(self, iterable: Any, **_: str) -> Any:  # Any: any iterable
        """``iterable`` itself."""
        return iterable

    def log(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Nothing."""

    def begin(self, name: str) -> Token:
        """Nothing is timed."""
        return Token(name)

    def end(self, token: Token) -> None:
        """Nothing was."""

    def report(self) -> None:
        """Nothing is known."""

    def on(self, stage: str, **_: Callable[[], object] | None) -> Handle:
        """Nobody sees a stage."""
        del stage
        return Handle()

    def cache(self, name: str, *, size: Callable[[], int]) -> Handle:
        """Nobody asks for it."""
        del name, size
        return Handle()

    def capture(self, **_: Any) -> str:  # Any: see ``otel_train.capture``
        """None is made."""
        return "otel_train is disabled"

    def track(self, given: Mapping[str, Any]) -> None:
        """Nothing is logged."""

    def provide(self, meters: object = None, tracers: object = None) -> None:
        """Nothing is exported."""

    def find_models(self, finder: object = None) -> None:
        """None is watched."""

    def name_loaders(self, name: object) -> None:
        """None is watched."""

    def show_blocks(self, blocks: object) -> None:
        """Nothing is printed."""

    def epoch_captures(self) -> NoEpochCaptures:
        """None is made."""
        from otel_train.profiler.setup import NoEpochCaptures

        return NoEpochCaptures()

    def add_route(self, route: object) -> None:
        """Nothing is exported."""

    def estate(self) -> None:
        """Nothing is left behind."""

    def let_go_in_fork(self) -> None:
        """Nothing is held."""

    def summary(self) -> dict[str, Any]:
        """Nothing is known."""
        return {}

    def reset_window(self) -> None:
        """Nothing."""

    def close(self, state: str = "") -> None:
        """Nothing."""

    def __enter__(self) -> DisabledSession:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""
