"""Writes docs/reference/settings.md from the fields of ``Config`` and the text below each."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train.config import settings  # noqa: E402 - the checkout's own, installed or not
from otel_train.config.validation import PREFIX, text_of  # noqa: E402 - as above
from tools.generated import write_or_check  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = ROOT / "docs" / "reference" / "settings.md"
HEAD = """\
<!-- Generated from otel_train/config/settings.py by `python tools/settings_page.py --write`. -->

# Settings

Every setting can be set in four places, under the same name:

| Place | How |
| --- | --- |
| code | a keyword of `otel_train.instrument(...)`, or a field of `otel_train.Config(...)` given as `config=` |
| environment | a variable: `OTEL_TRAIN_` and the name in capitals. `otel-train run --set name=value` sets one |
| YAML file | a key of the file that `config_file=` or the variable `OTEL_TRAIN_CONFIG` names |
| `pyproject.toml` | a key of the table `[tool.otel_train]` |

## Precedence

keyword > `Config` > environment > YAML file > `pyproject.toml` > default. Precedence applies to each setting separately. A
field of a `Config` that has its default value counts as not set. One YAML file is read: `config_file=`, else
`OTEL_TRAIN_CONFIG`.

`otel-train doctor` prints the settings in force in a folder, and the source of each. A run writes the sources to
`settings_from` in `run.json`, `summary.json` and the artifact `config.json`, and names the files in its run summary.

## The same in four spellings

```python
import otel_train

otel_train.instrument(run_dir="/data/runs", log_every_steps=100, wandb={"project": "mine"})
```

```sh
OTEL_TRAIN_RUN_DIR=/data/runs OTEL_TRAIN_LOG_EVERY_STEPS=100 OTEL_TRAIN_WANDB=on python train.py
```

```yaml
# settings.yaml, with OTEL_TRAIN_CONFIG=settings.yaml or config_file="settings.yaml"
run_dir: /data/runs
log_every_steps: 100
wandb: {project: mine}
```

```toml
# pyproject.toml
[tool.otel_train]
run_dir = "/data/runs"
log_every_steps = 100
wandb = {project = "mine"}
```

## Which files are read

- The nearest `pyproject.toml`: from the working directory up to the root of the repository (the folder with `.git`),
  and nothing above it. Outside a repository only the working directory itself. Only the nearest file is used, also if it
  has no `otel_train` table. A file without the text `otel_train` is not parsed.
- The YAML file, with a path relative to the working directory. It needs the extra: `pip install 'otel-train[yaml]'`.
- Files are read once, in `instrument()`; loader workers read none. If code or environment sets `disabled`, no file is read.
- Paths in a file are relative to the working directory, as in code.

## What is refused, and what is ignored

A wrong keyword or `Config` raises `ConfigError` at the call, with value, rule and remedy; so does the path of a
`config_file` that cannot be read, and an option of a command. A keyword that is not in this table is wrong as well; the
nearest name is suggested.

A wrong `OTEL_TRAIN_*` or `OTEL_*` variable, and a wrong value in a settings file, never stop training. They count as not
set: the next place is used, finally the default. They are logged once per process and listed in `settings_ignored` of
`summary.json` and `run.json` (`name`, `from`, `problem`, `used`), in the run summary, and by `otel-train doctor`. A value is
also checked if a place with higher precedence overrides it. A settings file is a regular file of at most 4 MiB.

An agent process checks two keywords after the call has returned: whether this machine can listen on `prometheus_address`, and whether
the `exporters` can be made. Wrong ones are ignored in the same way (`from`: `code`); with `agent="thread"` the call raises.

Of the `OTEL_*` variables a wrong protocol or timeout falls back to its default. With a wrong endpoint, certificate or key
that signal is not sent by OTLP.

In the environment `true`, `1`, `yes`, `on` and `false`, `0`, `no`, `off` are switches, and an empty value counts as not
set; so does `null` in YAML. A tracker may be a table in YAML and TOML, where code takes a dict.

The standard `OTEL_*` variables keep their meaning; see [how to export by OTLP](../howto/export-otlp.md).

## All settings, with their defaults

| Code | Environment | YAML | `pyproject.toml` | Meaning |
| --- | --- | --- | --- | --- |
"""
UNREAD = " **Accepted, without effect in this version.**"


def meanings() -> Mapping[str, str]:
    """Returns the docstring below each setting's field, by setting."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(settings.Config)).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    )
    found = {}
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def unread() -> set[str]:
    """Returns the settings that no module reads and no tracker declares."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "otel_train").rglob("*.py"))
    return {name for name in settings.DEFAULTS if not re.search(rf"\.{name}\b|setting=.{name}\b", source)}


def page() -> str:
    """Returns the text of the page."""
    texts, idle = meanings(), unread()
    rows = [
        f"| {' | '.join(f'`{spelling}`' for spelling in spellings(name, default))} | "
        f"{_markdown(texts[name])}{UNREAD if name in idle else ''} |"
        for name, default in settings.DEFAULTS.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def spellings(name: str, default: object) -> tuple[str, str, str, str]:
    """Returns a setting with its default in code, as a variable, in YAML, in TOML."""
    written = json.dumps(default)  # YAML and TOML read these JSON values in the same way
    return (
        f"{name}={default!r}",
        f"{PREFIX}{name.upper()}={text_of(default)}",
        f"{name}: {written}",
        f"{name} = {written}",
    )


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, says=__doc__))
