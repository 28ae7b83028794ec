"""What the ranks of one agent have in common: connections to a Collector, and the page of metrics."""

from __future__ import annotations

from otel_train.export.otlp_http import Connections
from otel_train.export.prometheus import MetricsServers


class Shared:
    """Ways out that all ranks of one agent use.

    Args:
        ranks: how many there may be: one, or more.

    Attributes:
        connections: to collectors, kept between requests.
        servers: of ``/metrics``.
        alone: there is one rank.
    """

    def __init__(self, ranks: int) -> None:
        self.connections = Connections()
        self.servers = MetricsServers()
        self.alone = ranks == 1

    def close(self) -> None:
        """After the last rank: let go of connections."""
        self.connections.close()
