"""The session that all callbacks of a process share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from otel_train import api
from otel_train.config.sources import resolve
from otel_train.config.validation import words_of
from otel_train.safety import Guard
from otel_train.trackers.manager import split_settings

if TYPE_CHECKING:
    from otel_train.config.settings import ResolvedConfig
    from otel_train.instrumentation.stages import Epoch
    from otel_train.session import Session


class SharedSession:
    """Opens a session for the first callback that joins, and closes it when the last one leaves.

    A session that ``otel_train.instrument`` has opened is joined and stays open; so is that of ``otel-train run``, which
    lasts as long as the program.
    """

    def __init__(self) -> None:
        self._holders: WeakSet[Any] = WeakSet()
        self._own: Session | None = None
        self.opened = 0

    def join(
        self, holder: object, given: Mapping[str, Any], model: Any = None, loaders: Any = None
    ) -> Session:
        """Adds a callback to the session."""
        before = api.current()
        session = api.instrument(model, loaders, **given)
        if before is None:
            self.opened += 1
            self._holders.clear()  # they held a session that the program has closed
            self._own = None if api.when_started else session
        session.find_models()
        self._holders.add(holder)
        return session

    def leave(self, holder: object, error: BaseException | None = None) -> None:
        """Removes a callback from the session. A second call does nothing."""
        if holder not in self._holders:
            return
        self._holders.discard(holder)
        if self._holders:
            return
        own, self._own = self._own, None
        if own is not None:
            own.__exit__(None if error is None else type(error), error, None)


shared = SharedSession()
"""Of this process."""


def without_containers(value: Any) -> Any:  # Any: as a configuration library gives it
    """Converts containers of configuration libraries such as Hydra to dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): without_containers(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple)):
        return [without_containers(each) for each in value]
    return value


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns checked settings as keywords of ``instrument``."""
    settings = {name: without_containers(value) for name, value in given.items()}
    resolved(settings)
    return settings


def resolved(given: Mapping[str, Any]) -> ResolvedConfig:
    """Resolves the settings of a session with these keywords."""
    sources = {name: given[name] for name in ("config", "config_file") if name in given}
    rest = {name: value for name, value in given.items() if name not in sources}
    return resolve(sources.get("config"), split_settings(rest)[0], config_file=sources.get("config_file"))


def merged(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the settings of several callbacks: a later one wins, and console blocks add up."""
    together: dict[str, Any] = {}
    for given in several:
        together.update(given)
    blocks = [block for given in several for block in _words(given.get("console_metrics", ""))]
    if any(blocks):
        together["console_metrics"] = list(dict.fromkeys(filter(None, blocks)))
    return together


def _words(blocks: Any) -> list[str]:  # Any: text or a list
    return words_of(blocks) if isinstance(blocks, str) else [word.strip() for word in blocks]


class CallbackSession:
    """The shared session as one callback uses it. Stops faults of this package by a ``Guard``."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.guard = Guard(name)
        self._settings = checked(settings)
        self._epoch: Epoch | None = None

    def join(self) -> Session:
        """Opens or joins the session."""
        return shared.join(self, self._settings)

    def begin_epoch(self, number: Callable[[], int]) -> None:
        """Begins an epoch."""
        with self.guard:
            self._epoch = api.epoch(number())

    def end_epoch(self) -> None:
        """Ends the epoch."""
        if self._epoch is not None:
            self._epoch.end()

    def leave(self) -> None:
        """Closes the session if this callback opened it and no other uses it."""
        with self.guard:
            shared.leave(self)
