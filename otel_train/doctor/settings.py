"""Which settings hold, and where they come from."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from otel_train.config.settings import ENVIRONMENT
from otel_train.config.sources import settle
from otel_train.config.validation import PREFIX, text_of
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, Finding
from otel_train.exporters.otlp_settings import otlp_configured
from otel_train.resource import wrong_resource
from otel_train.trackers.manager import without_unusable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from otel_train.config.settings import ResolvedConfig

AREA = "settings"
SECRET = ("HEADERS", "TOKEN", "PASSWORD", "KEY")
"""Words in the name of a variable whose value is not shown. A path to a key is no loss."""

_LOGIN = re.compile(r"//[^/@\s]*@")
"""User name and password in an address."""


def look(environ: Mapping[str, str], *, folder: Path | None = None) -> Iterator[Finding]:
    """Say what the environment and files set. What a program passes to ``instrument`` is not seen from here.

    Args:
        environ: the environment that a run would have.
        folder: where it would start; the working directory when None.
    """
    settled = without_unusable(settle(environ=environ, folder=folder))
    for wrong in (*settled.origins.ignored, *wrong_resource(environ)):
        yield Finding(
            area=AREA,
            state=PROBLEM,
            what=str(wrong),
            remedy="correct it, or take it away: a variable is OTEL_TRAIN_ and the name in capitals",
        )
    yield from _switched_off(settled, environ)
    for name, (value, origin) in {**_ours(settled), **_standard(environ)}.items():
        shown = "(set, not shown)" if _secret(name) else _LOGIN.sub("//***@", value)
        yield Finding(area=AREA, state=OK, what=f"{name}={shown} ({origin})")
    counts = Counter(settled.origins.values())
    told = [f"{number} from {'the ' * (place == ENVIRONMENT)}{place}" for place, number in counts.items()]
    yield Finding(
        area=AREA,
        state=NOTE,
        what=f"{', '.join(told) or 'none from the environment or a file'}; "
        "the rest are defaults unless the program sets them",
    )


def _ours(settled: ResolvedConfig) -> dict[str, tuple[str, str]]:
    """Settings that somebody gives, under the name that they have where they come from."""
    return {
        PREFIX + name.upper() if origin == ENVIRONMENT else name: (
            text_of(settled.given.get(name, getattr(settled.config, name))),
            origin,
        )
        for name, origin in settled.origins.items()
    }


def _switched_off(settled: ResolvedConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What keeps figures from being measured or sent."""
    config = settled.config
    if config.disabled:
        name, where = _said("disabled", settled)
        yield Finding(
            area=AREA, state=PROBLEM, what=f"{name} switches everything off", remedy=f"unset {name}{where}"
        )
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding(
            area=AREA,
            state=WARNING,
            what="OTEL_SDK_DISABLED=true switches OTLP off",
            remedy="unset OTEL_SDK_DISABLED",
        )
    if config.otlp == "off" and otlp_configured(environ):
        name, where = _said("otlp", settled)
        yield Finding(
            area=AREA,
            state=WARNING,
            what=f"an OTLP endpoint is set, and {name}=off keeps anything from being sent there",
            remedy=f"unset {name}{where}",
        )


def _said(name: str, settled: ResolvedConfig) -> tuple[str, str]:
    """What a setting is called where it comes from, and where that is."""
    origin = settled.origins[name]
    return (PREFIX + name.upper(), "") if origin == ENVIRONMENT else (name, f" in {origin}")


def _standard(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {
        name: (value, ENVIRONMENT)
        for name, value in sorted(environ.items())
        if name.startswith("OTEL_") and not name.startswith("OTEL_TRAIN_") and value
    }


def _secret(name: str) -> bool:
    return any(word in name.upper() for word in SECRET)
