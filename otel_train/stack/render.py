"""Writes the configuration that Prometheus and Alertmanager of a local stack read."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from otel_train.errors import ConfigError
from otel_train.stack import files
from otel_train.stack.ports import HOST, Ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COLLECTOR: Final = "collector"
"""Name of the stack's Collector, on the runs it carries and on its target."""

_RECEIVER = re.compile(r"(?m)^  - name: (?P<name>\w+)$(?!\n    )")
"""A receiver of the shipped Alertmanager file that says nothing yet."""


def render(state: Path, ports: Ports, *, webhook: str = "", scrape: Sequence[str] = ()) -> None:
    """Write ``state/conf``: the shipped files, with the addresses of this stack beside them.

    Args:
        state: folder of the stack.
        ports: where its parts listen.
        webhook: address that every alert goes to; "" for none.
        scrape: addresses whose ``/metrics`` are scraped, such as ``127.0.0.1:9464``.

    Raises:
        ConfigError: ``webhook`` is not an address.
    """
    conf, shipped = state / "conf", files.folder() / "deploy"
    shutil.rmtree(conf, ignore_errors=True)
    conf.mkdir(parents=True, mode=0o700)
    (conf / "targets").mkdir()
    (conf / "targets.d").mkdir()
    shutil.copyfile(shipped / "prometheus" / "prometheus.yml", conf / "prometheus.yml")
    shutil.copytree(shipped / "prometheus" / "rules", conf / "rules")
    addresses = {
        "prometheus": ports.prometheus,
        "alertmanager": ports.alertmanager,
        "collector": ports.collector_metrics,
        "traces": ports.jaeger_metrics,
    }
    for name, port in addresses.items():
        labels = {"train_collector": COLLECTOR} if name == "collector" else {}
        _write_targets(conf / "targets" / f"{name}.yml", [f"{HOST}:{port}"], **labels)
    if scrape:
        _write_targets(conf / "targets.d" / "trainers.yml", scrape)
    write_alertmanager(conf / "alertmanager.yml", webhook)


def write_alertmanager(path: Path, webhook: str) -> None:
    """Write the shipped Alertmanager file, with an address in its receivers.

    Args:
        path: the file to write. Its folder is closed to others, as the address may carry a secret; the file itself
            is not, because a container reads it as another user.
        webhook: what every receiver calls; "" leaves them silent.

    Raises:
        ConfigError: ``webhook`` is not an http address.
    """
    text = (files.folder() / "deploy" / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
    if webhook:
        parsed = urlsplit(webhook)
        if parsed.scheme not in {"http", "https"} or not parsed.netloc:
            raise ConfigError(
                f"webhook {webhook!r}: expected an address such as http://127.0.0.1:5001/alerts"
            )
        call = f"    webhook_configs: [{{url: {json.dumps(webhook)}, send_resolved: true}}]"
        text = _RECEIVER.sub(lambda found: f"{found[0]}\n{call}", text)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(text, encoding="utf-8")


def _write_targets(path: Path, addresses: Sequence[str], **labels: str) -> None:
    """JSON is YAML, and Prometheus reads either."""
    path.write_text(json.dumps([{"targets": list(addresses), "labels": labels}]) + "\n", encoding="utf-8")
