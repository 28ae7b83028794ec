"""Where settings come from: the program, the environment, a YAML file, the project's ``pyproject.toml``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from otel_train.config import DEFAULTS, Config, changed, settings_in
from otel_train.errors import ConfigError
from otel_train.values import CHOICES, FILE_VARIABLE, SWITCHED, parsed, refusal, unknown

CODE, ENVIRONMENT = "code", "environment"
"""What ``Settled.origins`` says of settings that no file has; else it has the path of the file."""

PROJECT, TABLE = "pyproject.toml", "otel_train"

_log = logging.getLogger("otel_train")


class Settled(NamedTuple):
    """What holds for a run.

    Attributes:
        config: the settings.
        origins: where each setting that somebody has given comes from, by name.
        given: trackers that a file describes by a table, by the name of their setting.
    """

    config: Config
    origins: Mapping[str, str]
    given: Mapping[str, Mapping[str, Any]]


class Source(NamedTuple):
    """Settings from one place.

    Attributes:
        origin: which, as people are told.
        values: by name.
    """

    origin: str
    values: Mapping[str, Any]


def settle(
    config: Config | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Settled:
    """What holds: keywords over ``config`` over the environment over the YAML file over ``pyproject.toml``.

    A field of ``config`` that has its default value says nothing, so a source further away may fill it. Where one of
    the first three says ``disabled``, no file is read.

    Args:
        config: settings as an object.
        settings: settings by name.
        config_file: a YAML file; else ``OTEL_TRAIN_CONFIG`` names one.
        environ: the process environment.
        folder: where to begin to look for ``pyproject.toml``; the working directory when None.

    Raises:
        ConfigError: a value does not fit, a name is not a setting, or a file cannot be read.
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: expected an otel_train.Config. Pass Config(run_id=...)")
    if config_file is not None and not isinstance(config_file, (str, os.PathLike)):
        raise ConfigError(
            f"config_file={config_file!r}: expected the path of a YAML file. Pass its name as text"
        )
    for name in settings or {}:
        if name not in DEFAULTS:
            raise ConfigError(unknown(name, DEFAULTS))
    sources = [
        Source(CODE, settings or {}),
        Source(CODE, changed(config) if config is not None else {}),
        Source(ENVIRONMENT, settings_in(environ)),
    ]
    if not next((source.values["disabled"] for source in sources if "disabled" in source.values), False):
        sources += _files(config_file, environ, folder)
    return _merged(sources)


def _merged(sources: list[Source]) -> Settled:
    """The nearest source that has a setting decides."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        for name, value in source.values.items():
            if name not in values:
                values[name], origins[name] = value, source.origin
    given = {name: values[name] for name in SWITCHED if isinstance(values.get(name), dict)}
    return Settled(Config(**{**values, **dict.fromkeys(given, "on")}), origins, given)


def _files(
    config_file: str | os.PathLike[str] | None, environ: Mapping[str, str], folder: Path | None
) -> list[Source]:
    found = []
    if config_file is not None:
        found.append(_from_yaml(Path(config_file), f"config_file={str(config_file)!r}"))
    elif environ.get(FILE_VARIABLE):
        found.append(_from_yaml(Path(environ[FILE_VARIABLE]), f"{FILE_VARIABLE}={environ[FILE_VARIABLE]!r}"))
    project = project_file(folder)
    table = None if project is None else _project_table(project)
    if table is not None:
        found.append(Source(str(project), _checked(table, f"{project}: [tool.{TABLE}]")))
    return found


def project_file(folder: Path | None = None) -> Path | None:
    """The nearest ``pyproject.toml``: from ``folder`` up to the root of the repository that it is in, and no further.

    Args:
        folder: where to begin; the working directory when None. Outside of a repository nothing above it is looked at.
    """
    try:
        begin = Path.cwd() if folder is None else folder.absolute()
    except OSError:  # the working directory is gone
        return None
    places = [begin, *begin.parents]
    root = next((number for number, place in enumerate(places) if (place / ".git").exists()), 0)
    return next((place / PROJECT for place in places[: root + 1] if (place / PROJECT).is_file()), None)


def _project_table(path: Path) -> object:
    """What ``[tool.otel_train]`` holds; None where there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        _log.warning("%s cannot be read (%s); settings in it do not hold", path, error.strerror)
        return None
    # Nearly every project has this file, and few of them speak of us: those are not parsed.
    if b"otel_train" not in raw and b"tool.otel-train" not in raw:
        return None
    text = raw.decode("utf-8", "replace")
    tool = _toml(path, text).get("tool")
    tables = tool if isinstance(tool, dict) else {}
    if "otel-train" in tables:
        raise ConfigError(f"{path}: [tool.otel-train]: no table of ours. Write [tool.{TABLE}]")
    return tables.get(TABLE)


def _toml(path: Path, text: str) -> dict[str, Any]:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return dict(toml.loads(text))
    except ValueError as error:
        raise ConfigError(
            f"{path}: no TOML: {error}. Correct it; otel_train reads [tool.{TABLE}] in it"
        ) from None


def _from_yaml(path: Path, named: str) -> Source:
    """The settings in a YAML file that was asked for."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(
            f"{named}: yaml is not installed. Run: pip install 'otel-train[yaml]', "
            f"or give the settings in [tool.{TABLE}] of {PROJECT}"
        ) from None
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{named}: cannot be read: {error.strerror}. Give the path of a YAML file"
        ) from None
    try:
        held = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named}: no YAML: {' '.join(str(error).split())}. Correct it") from None
    return Source(str(path.absolute()), _checked({} if held is None else held, named))


def _checked(held: object, where: str) -> dict[str, Any]:
    """The settings in a file, each as good as one from code.

    Raises:
        ConfigError: one of them is not; the message names the file.
    """
    if not isinstance(held, Mapping):
        raise ConfigError(f"{where}: {type(held).__name__}: expected names of settings with a value each")
    values: dict[str, Any] = {}
    for name, value in held.items():
        if name not in DEFAULTS:
            raise ConfigError(f"{where}: {unknown(str(name), DEFAULTS)}")
        if value is None:
            continue  # as an empty variable is
        try:
            values[name] = _native(name, value)
            if name not in SWITCHED or not isinstance(value, Mapping):
                Config(**{name: values[name]})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return values


def _native(name: str, value: object) -> object:
    """What a file holds, as code would say it."""
    default = DEFAULTS[name]
    if isinstance(value, Mapping):
        if name not in SWITCHED:
            raise ConfigError(refusal(name, dict(value), "one value, no table", default))
        return dict(value)
    if isinstance(value, bool) and "off" in CHOICES.get(name, ()):
        return "on" if value else "off"  # to YAML the bare words on and off are true and false
    if isinstance(value, str) and not isinstance(default, str):
        return parsed(name, value, default)  # as in the environment; to YAML 1e9 is text
    return value
