"""Sends every metric of a run to a StatsD server as a gauge; a histogram as its mean and its count."""

import os
import socket

from otel_train.datamodel import HistogramPoint


class Statsd:
    def __init__(self, resource):
        host, _, port = os.environ.get("STATSD_ADDRESS", "127.0.0.1:8125").rpartition(":")
        self._address = (host, int(port))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._rank = f"rank{resource['train.rank']}"

    def export(self, batch):
        for family in batch.snapshot.families if batch.snapshot else ():
            for point in family.points:
                name = ".".join([self._rank, family.metric.name, *(value for _, value in point.attributes)])
                if isinstance(point, HistogramPoint):
                    self._send(f"{name}.count", point.count)
                    self._send(f"{name}.mean", point.sum / max(point.count, 1))
                else:
                    self._send(name, point.value)

    def _send(self, name, value):
        self._socket.sendto(f"{name.replace(':', '_')}:{value}|g".encode(), self._address)

    def close(self, timeout_s):  # noqa: ARG002 - nothing to wait for
        self._socket.close()
