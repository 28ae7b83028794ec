"""Sources of settings: code, environment, a YAML file, the nearest ``pyproject.toml``."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from otel_train.config.settings import (
    CODE,
    DEFAULTS,
    ENVIRONMENT,
    SETTINGS,
    TRACKERS,
    Config,
    GivenSettings,
    Origins,
    ResolvedConfig,
    changed,
    in_force,
    present,
    settings_in,
    unknown,
    unknown_names,
)
from otel_train.config.validation import FILE_VARIABLE, IgnoredSetting
from otel_train.errors import ConfigError

_Source = tuple[str, GivenSettings]
"""Name of a source in messages, and its settings."""

PROJECT, TABLE = "pyproject.toml", "otel_train"

MOST_FILE_BYTES: Final = 4 << 20
"""Largest settings file that is read; a larger file is not one of settings."""


_MAY_HAVE_TABLE: Final = (
    rb"""(?m)tool["']?\s*\.\s*["']?otel[_-]train|(?:^|[{,])[ \t]*(["']?)otel[_-]train\1\s*[.=]"""
)
"""Pattern of a file that sets ``tool.otel_train`` in any TOML spelling without escapes; a dependency on otel-train does not match.
Compiled only if there is a file, because that takes 0.2 ms."""


def resolve(
    config: Config | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    parameters: Iterable[str] = (),
) -> ResolvedConfig:
    """Resolves all settings: keywords over ``config`` over the environment over the YAML file over ``pyproject.toml``.

    A field of ``config`` that has its default value counts as not given. If one of the first three sources sets ``disabled``,
    no file is read. Errors in the environment or in a file count as not given, and are in ``ResolvedConfig.origins.ignored``.

    Args:
        config: settings as an object.
        settings: settings by name.
        config_file: a YAML file; else ``OTEL_TRAIN_CONFIG`` names one.
        environ: the variables; those of the process when None.
        folder: where the search for ``pyproject.toml`` begins; the working directory when None.
        parameters: names of other arguments, to suggest for a name that is not a setting.

    Raises:
        ConfigError: in ``config`` or ``settings`` a value is invalid or a name is not a setting; ``config_file`` cannot
            be read.
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: expected an otel_train.Config. Pass Config(run_id=...)")
    if config_file is not None and not isinstance(config_file, (str, os.PathLike)):
        raise ConfigError(
            f"config_file={config_file!r}: expected the path of a YAML file. Pass its name as text"
        )
    environ = os.environ if environ is None else environ
    keywords, deprecated = present(settings or {})
    for name in keywords:
        if name not in DEFAULTS:
            raise ConfigError(unknown(name, parameters=parameters))
    sources = [
        (CODE, GivenSettings(keywords, [], deprecated)),
        (CODE, GivenSettings(changed(config) if config is not None else {}, [])),
        (ENVIRONMENT, settings_in(environ)),
    ]
    if not next((given.values["disabled"] for _, given in sources if "disabled" in given.values), False):
        sources += _files(config_file, environ, folder)
    return _merged(sources)


def _merged(sources: list[_Source]) -> ResolvedConfig:
    """Takes each setting from the first source that has it."""
    values: dict[str, Any] = {}
    origins = Origins()
    for origin, given in sources:
        for name, value in given.values.items():
            if name not in values:
                values[name], origins[name] = value, origin
    tables = {name: values[name] for name in TRACKERS if isinstance(values.get(name), dict)}
    config = Config(**{**values, **dict.fromkeys(tables, "on")})
    origins.ignored = in_force((each for _, given in sources for each in given.ignored), config)
    origins.deprecated = tuple(each for _, given in sources for each in given.deprecated)
    return ResolvedConfig(config, origins, tables)


def _files(
    config_file: str | os.PathLike[str] | None, environ: Mapping[str, str], folder: Path | None
) -> Iterator[_Source]:
    if config_file is not None:
        yield _from_yaml(Path(config_file), f"config_file={str(config_file)!r}")
    elif path := environ.get(FILE_VARIABLE):
        try:
            yield _from_yaml(Path(path), f"{FILE_VARIABLE}={path!r}")
        except ConfigError as error:
            yield _wrong(FILE_VARIABLE, ENVIRONMENT, str(error))
    project = project_file(folder)
    if project is not None:
        yield _from_project(project)


def project_file(folder: Path | None = None) -> Path | None:
    """Returns the nearest ``pyproject.toml`` from ``folder`` up to the root of its repository; without a repository, in ``folder``."""
    try:
        begin = Path.cwd() if folder is None else folder.absolute()
        places = [begin, *begin.parents]
        root = next((number for number, place in enumerate(places) if (place / ".git").exists()), 0)
        return next((place / PROJECT for place in places[: root + 1] if (place / PROJECT).is_file()), None)
    except OSError:  # the working directory no longer exists, or a folder above it is not searchable
        return None


def _read(path: Path) -> bytes:
    from otel_train.files import read_named  # imported here, as most programs have no settings file

    return read_named(path, MOST_FILE_BYTES)


def _from_project(path: Path) -> _Source:
    try:
        raw = _read(path)
        text = raw.replace(b"\0", b"")  # also finds ASCII text in UTF-16 and UTF-32
        if not re.search(_MAY_HAVE_TABLE, text):  # saves 5 ms for the parser and its import
            return str(path), GivenSettings({}, [])
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        tool = toml.loads(raw.decode("utf-8", "replace")).get("tool")
    except OSError as error:
        return _unread(path, f"{path}: {_unreadable(error, 'Make it readable')}")
    except (ValueError, RecursionError) as error:
        problem = _encoding_problem(raw) or f"{error}. Correct it"
        return _unread(path, f"{path}: no TOML: {problem}; otel_train reads [tool.{TABLE}] in it")
    tables = tool if isinstance(tool, dict) else {}
    if "otel-train" in tables:
        return _unread(path, f"{path}: [tool.otel-train]: not a table that is read. Write [tool.{TABLE}]")
    return _checked(tables.get(TABLE), str(path), f"{path}: [tool.{TABLE}]")


def _encoding_problem(raw: bytes) -> str:
    """Returns why the encoding of a file is not the one of TOML, with the remedy; "" if it may be."""
    if b"\0" in raw:
        encoding = "UTF-16 or UTF-32"
    elif raw.startswith(b"\xef\xbb\xbf"):
        encoding = "UTF-8 with a byte order mark"
    else:
        return ""
    return f"its encoding is {encoding}. Save it as UTF-8 without a byte order mark"


def _unreadable(error: OSError, remedy: str) -> str:
    if error.errno == errno.EFBIG:
        remedy = f"Give the settings in a smaller YAML file, which {FILE_VARIABLE} names"
    return f"cannot be read: {error.strerror}. {remedy}"


def _unread(path: Path, problem: str) -> _Source:
    return _wrong(path.name, str(path), problem)


def _wrong(name: str, origin: str, problem: str) -> _Source:
    return origin, GivenSettings({}, [IgnoredSetting(name, origin, problem)])


def _from_yaml(path: Path, named: str) -> _Source:
    try:
        import yaml
    except ModuleNotFoundError:
        remedy = f"pip install 'otel-train[yaml]', or give the settings in [tool.{TABLE}] of {PROJECT}"
        raise ConfigError(f"{named}: yaml is not installed. Run: {remedy}") from None
    try:
        content = yaml.safe_load(_read(path))
    except OSError as error:
        raise ConfigError(f"{named}: {_unreadable(error, 'Give the path of a YAML file')}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-02-31
        return _unread(path.absolute(), f"{named}: no YAML: {' '.join(str(error).split())}. Correct it")
    return _checked(content, str(path.absolute()), named)


def _checked(held: object, origin: str, where: str) -> _Source:
    """Returns the settings of a file, checked by the same rules as in code."""
    if held is not None and not isinstance(held, Mapping):
        rule = "expected names of settings with a value each"
        return _unread(Path(origin), f"{where}: {type(held).__name__}: {rule}. Write run_name: mine")
    values: dict[str, Any] = {}
    ignored = []
    named, deprecated = present(held or {})
    unknown_keys = [str(name) for name in named if name not in DEFAULTS]
    for name, value in named.items():
        if name not in DEFAULTS:
            continue
        try:
            native = _native(name, value)
        except ConfigError as error:
            ignored.append(IgnoredSetting(name, origin, f"{where}: {error}"))
            continue
        if native is not None:  # null, like an empty variable, counts as not set
            values[name] = native
    ignored += unknown_names(unknown_keys, origin, f"{where}: ")
    return origin, GivenSettings(values, ignored, tuple(f"{where}: {each}" for each in deprecated))


def _native(name: str, value: object) -> object:
    """Converts a value of a file to the form that code uses."""
    known = SETTINGS[name]
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not known.rule.table:
            raise known.refused(dict(value), "one value, no table")
        return dict(value) if name in TRACKERS else known.checked(value)
    if isinstance(value, bool) and "off" in getattr(known.rule, "choices", ()):
        value = "on" if value else "off"  # YAML reads the bare words on and off as booleans
    elif isinstance(value, str) and not isinstance(known.default, str):
        return known.read(name, value)  # parsed as in the environment: YAML reads 1e9 as text
    known.checked(value)
    return value
