"""Ports, files, configuration and health of the stack."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import Request

from otel_train.config.validation import MOST_PORT, split_address
from otel_train.errors import ConfigError, StackError

MARK = "docker-compose.yml"  # identifies the folder of the stack's files


def folder() -> Path:
    """Returns the folder with ``docker-compose.yml``, ``.env``, ``deploy`` and ``grafana``.

    A wheel carries them beside this module; a checkout has them at its top.
    """
    here = Path(__file__).resolve()
    for candidate in (here.parent / "files", here.parents[2]):
        if (candidate / MARK).is_file() and (candidate / "deploy").is_dir():
            return candidate
    raise StackError(
        f"the stack's files are not beside {here.parent}: this installation of otel-train is not complete. "
        "Install it again from a wheel or a checkout"
    )


def settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables of ``.env``; those of the environment take precedence, as in Compose."""
    environ = os.environ if environ is None else environ
    found = {}
    for line in (folder() / ".env").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            found[name] = environ.get(name) or value
    return found


def state_folder() -> Path:
    """Returns the folder for data, logs and process ids of the stack. Does not create it."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "otel-train" / "stack"


ASK_EVERY_S = 0.25  # between two health checks
ANSWER_WITHIN_S = 2.0  # limit of one


class _SameOriginHeaders(urllib.request.HTTPRedirectHandler):
    """Follows redirects; another origin does not get the headers of the request, which may have a token."""

    def redirect_request(self, req: Request, *response: Any) -> Request | None:
        """See the base class."""
        redirected = super().redirect_request(req, *response)
        if redirected is not None and (redirected.type, redirected.host) != (req.type, req.host):
            redirected.headers.clear()
        return redirected


def open_url(request: Request, timeout_s: float) -> Any:  # Any: the response of urllib
    """Opens a URL as ``urlopen`` does. The proxies of the environment are not used for loopback addresses."""
    host = urlsplit(request.full_url).hostname or ""
    with suppress(ValueError):  # a name
        host = "localhost" if ip_address(host).is_loopback else host
    direct = [urllib.request.ProxyHandler({})] if host == "localhost" else []
    return urllib.request.build_opener(_SameOriginHeaders, *direct).open(request, timeout=timeout_s)


def healthy(url: str) -> bool:
    """Returns whether ``url`` answers over HTTP with a status below 300."""
    try:
        with open_url(Request(url), ANSWER_WITHIN_S):
            return True
    except (OSError, http.client.HTTPException, ValueError):
        return False


def wait(
    urls: Mapping[str, str],
    *,
    timeout_s: float,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Waits until every service is healthy; reports each by ``say``. ``check`` is called between two rounds, and may raise."""
    started_s = time.monotonic()
    missing = dict(urls)
    while True:
        for name in [name for name, url in missing.items() if healthy(url)]:
            del missing[name]
            say(f"  {name:<14} ready after {time.monotonic() - started_s:.1f} s")
        if not missing:
            return
        check()
        if time.monotonic() - started_s > timeout_s:
            named = ", ".join(f"{name} ({url})" for name, url in missing.items())
            raise StackError(
                f"not ready within {timeout_s:.0f} s: {named}. `otel-train stack logs` may say why"
            )
        time.sleep(ASK_EVERY_S)


HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """One port for each listening service."""

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
        """Returns the ports that ``.env`` sets, with defaults for the others."""
        named = {field.name: settings.get(f"{field.name.upper()}_PORT", "") for field in fields(cls)}
        return cls().changed(f"{name}={number}" for name, number in named.items() if number)

    def changed(self, words: Iterable[str]) -> Ports:
        """Returns these ports with some replaced, each as ``NAME=NUMBER``."""
        changes = {}
        for word in words:
            name, _, number = word.partition("=")
            if name not in asdict(self):
                raise ConfigError(
                    f"port {word!r}: expected NAME=NUMBER with one of {', '.join(asdict(self))}"
                )
            if not number.isdecimal() or not 0 < int(number) <= MOST_PORT:
                raise ConfigError(f"port {word!r}: expected a number from 1 to {MOST_PORT}")
            changes[name] = int(number)
        return replace(self, **changes)

    def check_free(self) -> None:
        """Raises StackError if a port is in use."""
        taken = [f"{name}={number}" for name, number in asdict(self).items() if not _free(number)]
        if taken:
            raise StackError(
                f"these ports of {HOST} are taken: {', '.join(taken)}. Stop the program that uses them, which may be a stack in "
                f"containers, or choose another with --port, such as --port {taken[0].partition('=')[0]}=20000"
            )


def _free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


COLLECTOR: Final = "collector"
"""Name of the stack's Collector in the metrics of the runs that it forwards, and of its scrape target."""

_RECEIVER = re.compile(r"(?m)^  - name: (?P<name>\w+)$(?!\n    )")
"""A receiver without a configuration, in the shipped Alertmanager file."""


def render(state: Path, ports: Ports, *, webhook: str = "", scrape: Sequence[str] = ()) -> None:
    """Writes ``state/conf``: the shipped files, and the scrape targets of this stack."""
    conf, shipped = state / "conf", folder() / "deploy" / "prometheus"
    shutil.rmtree(conf, ignore_errors=True)
    conf.mkdir(parents=True, mode=0o700)
    (conf / "targets").mkdir()
    (conf / "targets.d").mkdir()
    shutil.copyfile(shipped / "prometheus.yml", conf / "prometheus.yml")
    shutil.copytree(shipped / "rules", conf / "rules")
    addresses = {
        "prometheus": ports.prometheus,
        "alertmanager": ports.alertmanager,
        "collector": ports.collector_metrics,
        "traces": ports.jaeger_metrics,
    }
    for name, port in addresses.items():
        labels = {"train_collector": COLLECTOR} if name == "collector" else {}
        _write_targets(conf / "targets" / f"{name}.yml", [f"{HOST}:{port}"], **labels)
    for address in scrape:
        # Prometheus would start without an invalid target, and report it in its log only.
        if "/" in address or split_address(address) is None:
            raise ConfigError(
                f"scrape {address!r}: expected host:port of a /metrics address, such as 127.0.0.1:9464"
            )
    if scrape:
        _write_targets(conf / "targets.d" / "trainers.yml", scrape)
    write_alertmanager(conf / "alertmanager.yml", webhook)


def write_alertmanager(path: Path, webhook: str) -> None:
    """Writes the shipped Alertmanager file, with the webhook that every receiver calls; "" for none.

    Other users may not enter the folder, as the address may contain a secret; they may read the file: a container reads it
    as another user.
    """
    text = (folder() / "deploy" / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
    if webhook:
        parsed = urlsplit(webhook)
        if parsed.scheme not in {"http", "https"} or not parsed.netloc:
            raise ConfigError(
                f"webhook {webhook!r}: expected an address such as http://127.0.0.1:5001/alerts"
            )
        receiver = f"    webhook_configs: [{{url: {json.dumps(webhook)}, send_resolved: true}}]"
        text = _RECEIVER.sub(lambda found: f"{found[0]}\n{receiver}", text)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(text, encoding="utf-8")


def _write_targets(path: Path, addresses: Sequence[str], **labels: str) -> None:
    """Writes Prometheus' targets as JSON, which is also YAML."""
    path.write_text(json.dumps([{"targets": list(addresses), "labels": labels}]) + "\n", encoding="utf-8")
