"""The ports of the stack on this machine's loopback."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from otel_train.errors import ConfigError, StackError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HOST = "127.0.0.1"
LAST = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """One port for each thing that listens."""

    otlp_grpc: int = 4317
    otlp_http: int = 4318
    collector_health: int = 13133
    collector_metrics: int = 8888
    prometheus: int = 9090
    alertmanager: int = 9093
    jaeger: int = 16686
    jaeger_grpc: int = 16685
    jaeger_otlp: int = 14317
    jaeger_health: int = 13134
    jaeger_metrics: int = 8889

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Ports:
        """The ports that ``.env`` names, and the defaults of the rest.

        Raises:
            ConfigError: a port is not a number from 1 to 65535.
        """
        named = {field.name: settings.get(f"{field.name.upper()}_PORT", "") for field in fields(cls)}
        return cls().changed(f"{name}={number}" for name, number in named.items() if number)

    def changed(self, words: Iterable[str]) -> Ports:
        """These, with some replaced, each as ``NAME=NUMBER``.

        Raises:
            ConfigError: there is no such port, or no such number.
        """
        changes = {}
        for word in words:
            name, _, number = word.partition("=")
            if name not in asdict(self):
                raise ConfigError(
                    f"port {word!r}: expected NAME=NUMBER with one of {', '.join(asdict(self))}"
                )
            if not number.isdecimal() or not 0 < int(number) <= LAST:
                raise ConfigError(f"port {word!r}: expected a number from 1 to {LAST}")
            changes[name] = int(number)
        return replace(self, **changes)

    def check_free(self) -> None:
        """Find out before anything starts.

        Raises:
            StackError: some are taken; the message names all of them.
        """
        taken = [f"{name}={number}" for name, number in asdict(self).items() if not _free(number)]
        if taken:
            raise StackError(
                f"these ports of {HOST} are taken: {', '.join(taken)}. Stop what listens there, which may be a stack in "
                f"containers, or choose another with --port, such as --port {taken[0].partition('=')[0]}=20000"
            )


def free_ports() -> Ports:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.create_server((HOST, 0)) for _ in fields(Ports)]
    numbers = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return Ports(**{field.name: number for field, number in zip(fields(Ports), numbers, strict=True)})


def _free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
