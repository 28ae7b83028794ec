"""The command that a launcher starts: the user's own, unchanged, in an environment that lets us in."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_train.agent.launcher_folder import FOLDER
from otel_train.config import settings_in
from otel_train.errors import ConfigError
from otel_train.exporters.settings import OtlpSettings
from otel_train.runinfo import LAUNCH_RUN, detect
from otel_train.sources import settle
from otel_train.values import FILE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SITE: Final = Path(__file__).parent / "site"
"""Goes on PYTHONPATH; see ``otel_train/autoinstrument/site/sitecustomize.py``."""

_WITH_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_UNREACHABLE = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}
_PYTHON = re.compile(rb"#!.*\bpython[0-9.]*\b")


def interpreter_flags(words: Sequence[str] = tuple(sys.orig_argv)) -> list[str]:
    """The options that this interpreter was started with, such as ``-u`` or ``-X dev``."""
    flags: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_A_VALUE:
            flags += [word, next(rest, "")]
        elif word[:2] in ("-X", "-W") or word.startswith("--"):
            flags.append(word)
        elif word[:1] != "-" or word == "-":
            break
        else:
            cluster = re.split("[mc]", word, maxsplit=1)
            if cluster[0] != "-":
                flags.append(cluster[0])
            if len(cluster) > 1:
                break
    return flags


def command_line(
    words: Sequence[str], *, module: str = "", flags: Sequence[str] = (), python: str = sys.executable
) -> list[str]:
    """What to start.

    Args:
        words: a script or a command, and its arguments; the arguments alone with ``module``.
        module: as in ``python -m``.
        flags: options of the interpreter.
        python: the interpreter.

    Raises:
        ConfigError: there is nothing to start, or no such script or command.
    """
    if module:
        return [python, *flags, "-m", module, *words]
    if not words:
        raise ConfigError("nothing to run: expected a script, a command, or -m and a module")
    path = Path(words[0])
    if path.is_dir() or (path.is_file() and _is_python(path)):
        return [python, *flags, *words]
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{words[0]}: no such file, and no such command. A script is given by its path, a module after -m"
        )
    return list(words)


def _is_python(path: Path) -> bool:
    """Whether ``python path`` is how to run it: anything but a program that names another interpreter."""
    if path.suffix in (".py", ".pyw", ".pyc", ".pyz", ".zip") or not os.access(path, os.X_OK):
        return True
    with path.open("rb") as opened:
        return _PYTHON.match(opened.readline(256)) is not None


def unreachable() -> str:
    """The interpreter option that keeps us out of a program; "" if none does."""
    return next((flag for name, flag in _UNREACHABLE.items() if getattr(sys.flags, name)), "")


def environment(environ: Mapping[str, str], settings: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of the command: the user's, the settings, and a way in.

    Args:
        environ: the user's.
        settings: ``OTEL_TRAIN_*`` and ``OTEL_*`` variables that were given as options; they win.
        folder: of this launch.

    Raises:
        ConfigError: a setting that was given as an option cannot be honoured. One of the environment is ignored, and the
            program warns of it.
    """
    _refuse_wrong(settings, environ)
    result = {**environ, **settings}
    config = settle(environ=result).config
    if config.disabled:
        return result
    if result.get(FILE_VARIABLE):
        result[FILE_VARIABLE] = str(Path(result[FILE_VARIABLE]).absolute())
    # A program that changes its folder still writes where its user looks.
    result["OTEL_TRAIN_RUN_DIR"] = str(Path(config.run_dir).absolute())
    result[FOLDER] = str(folder)
    result[LAUNCH_RUN] = detect(config, environ).run_id
    result["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [environ.get("PYTHONPATH")])])
    return result


def _refuse_wrong(settings: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Refuse wrong options.

    Raises:
        ConfigError: one of them cannot be honoured.
    """
    for wrong in settings_in(settings)[1]:
        raise ConfigError(wrong.problem)
    if path := settings.get(FILE_VARIABLE):
        settle(config_file=path, environ={})

    def refuse(variable: str, problem: str, _: str) -> None:
        if variable in settings:
            raise ConfigError(problem)

    OtlpSettings.read({**environ, **settings}, on_wrong=refuse)
