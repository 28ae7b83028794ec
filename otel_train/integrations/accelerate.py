"""A tracker for accelerate's ``Accelerator``."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from otel_train import api
from otel_train.errors import require
from otel_train.integrations.shared_session import CallbackSession

if TYPE_CHECKING:
    from otel_train.session import Session

_Tracker: Any = require("accelerate.tracking", extra="accelerate").GeneralTracker


class OtelTrainTracker(_Tracker):
    """Observes the loop of an Accelerator: ``Accelerator(log_with=OtelTrainTracker(run_name="baseline"))``.

    It is active from ``init_trackers`` to ``end_training``, on every rank. Loaders and models are found when used; logged
    values are recorded. A session that was open before is joined, and stays open.

    Args:
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting is invalid; the message has value, rule and remedy.
    """

    name = "otel_train"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._shared = CallbackSession("the accelerate tracker", settings)

    @property
    def tracker(self) -> Session | None:
        """The session."""
        return api.current()

    def start(self) -> None:
        """Opens the session, or joins it."""
        self._shared.join()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Does nothing: the program's configuration is not a metric."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Logs numbers, and tensors of one element, which are read later."""
        del step  # the session counts steps
        with self._shared.guard:
            session = api.current()
            if session is not None:
                session.log({name: value for name, value in values.items() if _is_number(value)})

    def finish(self) -> None:
        """Closes the session if this callback opened it and no other uses it."""
        self._shared.leave()


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or getattr(value, "numel", lambda: 0)() == 1
