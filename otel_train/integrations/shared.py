"""The one session that all callbacks in a process hold together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from otel_train import api
from otel_train.config.settings import CODE
from otel_train.config.sources import settle
from otel_train.config.validation import words_of
from otel_train.safety import Guard
from otel_train.trackers.manager import told_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.config.settings import Config, ResolvedConfig
    from otel_train.instrumentation.stages import Epoch
    from otel_train.session import Session

_log = logging.getLogger("otel_train")

FINISH_S = 60.0
"""Longest wait, when training is over, for captures to be written and looked into: they were asked for."""


class SharedSession:
    """Opened by the first who joins, closed when the last leaves.

    A session that was there before, of ``otel_train.instrument`` by hand, is joined and stays open; so does one
    below ``otel-train run``, which lasts as long as the program.

    Attributes:
        opened: sessions that were opened here.
    """

    def __init__(self) -> None:
        self._holders: WeakSet[Any] = WeakSet()
        self._own: Session | None = None
        self.opened = 0

    def join(
        self, holder: object, given: Mapping[str, Any], model: Any = None, loaders: Any = None
    ) -> Session:
        """Take part.

        Args:
            holder: who; may join again.
            given: settings, as for ``instrument``; a session that is open keeps its own.
            model: as for ``instrument``.
            loaders: as for ``instrument``.

        Raises:
            ConfigError: a setting, a model or a loader is not what it should be.
        """
        before = api.current()
        session = api.instrument(model, loaders, **given)
        if before is None:
            self.opened += 1
            self._holders.clear()  # of a session that has been closed by somebody else
            self._own = None if api.when_started else session
            session.find_models()
        elif holder not in self._holders:
            session.show_blocks(filter(None, _words(given.get("console_metrics", ""))))
            _say_what_is_too_late(session.config, given)
        self._holders.add(holder)
        return session

    def leave(self, holder: object, error: BaseException | None = None) -> None:
        """Take part no longer. A second call does nothing.

        Args:
            holder: who.
            error: what ended training, if that is why.
        """
        if holder not in self._holders:
            return
        self._holders.discard(holder)
        session, own = api.current(), self._own
        if self._holders:
            return
        if error is None and session is not None:
            session.epoch_captures().finish(FINISH_S)
        self._own = None
        if own is not None:
            own.__exit__(None if error is None else type(error), error, None)


shared = SharedSession()
"""Of this process."""


def plain(value: Any) -> Any:  # Any: what a configuration library made
    """``value`` with Python's own dicts and lists for those of Hydra, which are none."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple)):
        return [plain(each) for each in value]
    return value


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as keywords of ``instrument``, refused while whoever wrote them is still looking.

    Raises:
        ConfigError: one of them is not a setting, or cannot be honoured.
    """
    settings = {name: plain(value) for name, value in given.items()}
    settled(settings)
    return settings


def settled(given: Mapping[str, Any]) -> ResolvedConfig:
    """What holds for a session with these keywords.

    Raises:
        ConfigError: one of them is not a setting, or cannot be honoured.
    """
    sources = {name: given[name] for name in ("config", "config_file") if name in given}
    rest = {name: value for name, value in given.items() if name not in sources}
    return settle(sources.get("config"), told_apart(rest)[0], config_file=sources.get("config_file"))


def merged(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of several callbacks for one session: a later one wins, and blocks of the console add up."""
    together: dict[str, Any] = {}
    for given in several:
        together.update(given)
    blocks = [block for given in several for block in _words(given.get("console_metrics", ""))]
    if any(blocks):
        together["console_metrics"] = list(dict.fromkeys(filter(None, blocks)))
    return together


def _words(blocks: Any) -> list[str]:  # Any: text or a list
    return words_of(blocks) if isinstance(blocks, str) else [word.strip() for word in blocks]


def _say_what_is_too_late(config: Config, given: Mapping[str, Any]) -> None:
    asked = settled(given)
    late = [
        f"{name}={getattr(asked.config, name)!r}"
        for name, origin in asked.origins.items()
        if origin == CODE
        and getattr(asked.config, name) != getattr(config, name)
        and name != "console_metrics"
    ]
    if late:
        _log.warning("a session is open, and its own settings hold; not applied: %s", ", ".join(late))


class CallbackSession:
    """One callback's hold on the shared session, for the callbacks of any library; faults of ours stay here.

    Args:
        name: of the callback, as people call it.
        settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting cannot be honoured; says value, rule and remedy.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.guard = Guard(name)
        self._settings = checked(settings)
        self._epoch: Epoch | None = None

    def join(self) -> Session:
        """Open the session, or join it.

        Raises:
            ConfigError: see ``otel_train.instrument``.
        """
        return shared.join(self, self._settings)

    def begin_epoch(self, number: Callable[[], int]) -> None:
        """Mark the epoch that begins here."""
        with self.guard:
            self._epoch = api.epoch(number())

    def end_epoch(self) -> None:
        """It is over."""
        if self._epoch is not None:
            self._epoch.end()

    def leave(self) -> None:
        """Close the session, if it is ours and nobody else's."""
        with self.guard:
            shared.leave(self)
