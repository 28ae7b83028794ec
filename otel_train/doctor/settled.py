"""Which settings hold, and where they come from."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from otel_train.config import Config
from otel_train.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding
from otel_train.errors import ConfigError
from otel_train.export.settings import otlp_configured

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AREA = "settings"
SECRET = ("HEADERS", "TOKEN", "PASSWORD", "KEY")
"""Words in the name of a variable whose value is not shown. A path to a key is no loss."""

_LOGIN = re.compile(r"//[^/@\s]*@")
"""User name and password in an address."""


def config_of(environ: Mapping[str, str]) -> Config:
    """The settings of the environment; the defaults where they cannot be read, which ``look`` has told of."""
    try:
        return Config.from_env(environ)
    except ConfigError:
        return Config()


def look(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Say what the environment sets. What a program passes to ``instrument`` is not seen from here."""
    try:
        config = Config.from_env(environ)
    except ConfigError as error:
        yield Finding(
            area=AREA,
            state=PROBLEM,
            what=str(error),
            remedy="correct or unset that variable (OTEL_TRAIN_ and the name in capitals)",
        )
        return
    yield from _switched_off(config, environ)
    changed = config.to_env()
    for name, value in {**changed, **_standard(environ)}.items():
        shown = "(set, not shown)" if _secret(name) else _LOGIN.sub("//***@", value)
        yield Finding(area=AREA, state=OK, what=f"{name}={shown} (environment)")
    yield Finding(
        area=AREA,
        state=NOTE,
        what=f"{len(changed)} settings come from the environment, the rest are defaults unless the program sets them",
    )


def _switched_off(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What keeps figures from being measured or sent."""
    if config.disabled:
        yield Finding(
            area=AREA,
            state=PROBLEM,
            what="OTEL_TRAIN_DISABLED switches everything off",
            remedy="unset OTEL_TRAIN_DISABLED",
        )
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding(
            area=AREA,
            state=WARNING,
            what="OTEL_SDK_DISABLED=true switches OTLP off",
            remedy="unset OTEL_SDK_DISABLED",
        )
    if config.otlp == "off" and otlp_configured(environ):
        yield Finding(
            area=AREA,
            state=WARNING,
            what="an OTLP endpoint is set, and OTEL_TRAIN_OTLP=off keeps anything from being sent there",
            remedy="unset OTEL_TRAIN_OTLP",
        )


def _standard(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("OTEL_") and not name.startswith("OTEL_TRAIN_") and value
    }


def _secret(name: str) -> bool:
    return any(word in name for word in SECRET)
