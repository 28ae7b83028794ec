"""Writes docs/reference/settings.md from the fields of ``Config`` and the text below each."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train import config  # noqa: E402 - the checkout's own, installed or not

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = ROOT / "docs" / "reference" / "settings.md"
HEAD = """\
<!-- Generated from otel_train/config.py by `python tools/settings_page.py --write`. -->

# Settings

Every setting is a keyword of `otel_train.instrument(...)`, a field of `otel_train.Config`, and an environment
variable. A keyword wins over a `Config`, a `Config` over the environment, the environment over the default.

A value that cannot be honoured raises `ConfigError` at once. So does a keyword or an `OTEL_TRAIN_*` variable that is
not in this table. In the environment `true`, `1`, `yes`, `on` and `false`, `0`, `no`, `off` are switches, and an empty
value counts as not set.

The standard `OTEL_*` variables keep their meaning; see [how to export by OTLP](../howto/export-otlp.md).

| Setting | Environment | Default | Meaning |
| --- | --- | --- | --- |
"""
UNREAD = " **Accepted, without effect in this version.**"


def meanings() -> Mapping[str, str]:
    """Setting to the docstring below its field."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(config.Config)).body
        if isinstance(node, ast.ClassDef)
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
    """Settings that no module but ``config`` looks at."""
    modules = [path for path in (ROOT / "otel_train").rglob("*.py") if path.name != "config.py"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    return {name for name in config.DEFAULTS if not re.search(rf"\.{name}\b", source)}


def page() -> str:
    """The page as it should read."""
    texts, idle = meanings(), unread()
    rows = [
        f"| `{name}` | `{config.PREFIX}{name.upper()}` | `{default!r}` | "
        f"{_markdown(texts[name])}{UNREAD if name in idle else ''} |"
        for name, default in config.DEFAULTS.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())


def main() -> int:
    """Write the page, or say whether it is fresh."""
    parser = argparse.ArgumentParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="write the page")
    choice.add_argument("--check", action="store_true", help="exit with 1 when the page is stale")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: python tools/settings_page.py --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
