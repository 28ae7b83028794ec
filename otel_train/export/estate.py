"""What is known of a session at one instant: enough for another process to bring it to an end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from otel_train.aggregate.run import RunAccount
    from otel_train.aggregate.signals import Signals
    from otel_train.clock import Anchor
    from otel_train.config import Config
    from otel_train.records import AttributeValue
    from otel_train.runinfo import RunInfo


class Position(NamedTuple):
    """How far a thread's ring had been read.

    Attributes:
        slot: of the ring in the flight file.
        ident: identity of the thread.
        name: of the thread.
        key: what the account knows it by.
        main: it is the one that started the session.
        engine: it is one of autograd's own.
        taken: edges read, from the beginning.
    """

    slot: int
    ident: int
    name: str
    key: int
    main: bool
    engine: bool
    taken: int


class KnownLoader(NamedTuple):
    """What a report says of a loader beside its edges; the names are those of ``LoaderProbe``."""

    phase: str
    token_count: int
    workers: int | None
    sized: bool
    prefetch_factor: int | None
    persistent: bool
    weights: Any
    failures: dict[str, int]
    given: bool = True


def known_loaders(probes: Mapping[str, Any]) -> dict[str, KnownLoader]:
    """What to keep of loaders' probes."""
    return {
        name: KnownLoader(
            probe.phase,
            probe.token_count,
            probe.workers,
            probe.sized,
            probe.prefetch_factor,
            probe.persistent,
            probe.weights,
            dict(probe.failures),
            probe.given,
        )
        for name, probe in list(probes.items())
    }


class Known(NamedTuple):
    """Figures that no edge tells, as they were.

    Attributes:
        edges: read.
        missed: overwritten before they were read.
        cpu_s: of the pump.
        overhead_s: on the training thread.
        drops: records not exported, by (signal, reason).
        faults: faults of ours, by part.
        unobserved: what could not be seen.
        worker_exits: of loaders, by (loader, how).
    """

    edges: int
    missed: int
    cpu_s: float
    overhead_s: float
    drops: Mapping[tuple[str, str], int]
    faults: Mapping[str, int]
    unobserved: list[dict[str, str]]
    worker_exits: Mapping[tuple[str, str], int]


class Estate(NamedTuple):
    """A session at one instant.

    Attributes:
        config: its settings.
        info: who it is.
        resource: as it was sent.
        anchor: one instant on both clocks.
        run: the account of everything up to ``positions``.
        signals: the last logged values.
        loaders: by name.
        known: the rest.
        positions: up to where every ring is in the account.
        engine: times and codes that were read and wait for the edges of the main thread.
        path: the run directory.
        origins: where settings come from.
    """

    config: Config
    info: RunInfo
    resource: Mapping[str, AttributeValue]
    anchor: Anchor
    run: RunAccount
    signals: Signals
    loaders: Mapping[str, KnownLoader]
    known: Known
    positions: tuple[Position, ...]
    engine: list[tuple[np.ndarray, np.ndarray]]
    path: Path
    origins: Mapping[str, str]
