"""CI runs the commands that the README names, on a machine that keeps nothing for them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

RUN = Path(__file__).parents[2] / ".ci" / "run"

MAKE = """\
#!/bin/sh
for folder in "$HOME" "$XDG_CACHE_HOME"; do
    [ -d "$folder" ] && [ -z "$(ls -A "$folder")" ] && state=empty || state=kept
    echo "$1 $folder $state ${OTEL_TRAIN_TEST_BIN-unset}" >>"$SAID"
done
"""
"""Stands for make: writes down what it is asked to make, and which folders of the user it has."""


def test_nothing_that_is_left_on_a_machine_reaches_the_tests_of_the_readme(tmp_path: Path) -> None:
    """A test that passed only where `make test-stack` had run before it failed in a fresh checkout."""
    for name in ("bin", "home", "cache", "components"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").touch()
    (tmp_path / "bin" / "make").write_text(MAKE, encoding="utf-8")
    (tmp_path / "bin" / "make").chmod(0o755)
    home, cache, components = (str(tmp_path / name) for name in ("home", "cache", "components"))
    environ = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": home,
        "XDG_CACHE_HOME": cache,
        "OTEL_TRAIN_TEST_BIN": components,
        "SAID": str(tmp_path / "said"),
    }
    subprocess.run([str(RUN)], env=environ, check=True, timeout=60)
    said = [line.split() for line in (tmp_path / "said").read_text(encoding="utf-8").splitlines()]
    fresh = [line for line in said if line[0] == "test"]

    assert len(fresh) == 2
    assert {line[1] for line in fresh}.isdisjoint({home, cache})
    assert {(line[2], line[3]) for line in fresh} == {("empty", "unset")}
    assert not any(Path(line[1]).exists() for line in fresh), "the folders are removed afterwards"
    # What builds the components runs beside all of it, and may not have come to its turn.
    kept = {(line[0], line[1]) for line in said if line[0] not in {"test", "components"}}
    assert kept == {
        (target, folder) for target in ("static", "test-stack", "test-matrix") for folder in (home, cache)
    }
