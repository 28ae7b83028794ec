"""Builds the writer of edges in C, where there is a compiler, and puts the files of the stack into the wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = (".env", "docker-compose.yml", "deploy", "grafana")
SOURCES = ("otel_train/_edges.c", "otel_train/_device_events.c")
BUILT = "otel_train/_edges.abi3.so"
OLDEST = (3, 11)
"""Version of the stable ABI that the sources use: Python 3.10 writes edges in Python."""


class BuildHook(BuildHookInterface):  # type: ignore[misc,type-arg]  # hatchling is here only while building
    """What a wheel has beside the Python files. An editable install has the files of the stack where they lie."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what goes into the wheel."""
        built = self._compile(Path(self.root))
        if version == "editable":
            return
        build_data["force_include"].update({name: f"otel_train/stack/files/{name}" for name in CARRIED})
        if built:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(BUILT)
            build_data["pure_python"] = False
            build_data["tag"] = f"cp{OLDEST[0]}{OLDEST[1]}-abi3-{platform}"

    def _compile(self, root: Path) -> bool:
        """Whether the extension is there now. Without it everything works, at a higher cost per edge."""
        (root / BUILT).unlink(missing_ok=True)
        supported = sys.platform == "linux" and sys.implementation.name == "cpython"
        if not supported or sys.version_info < OLDEST or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return False
        compiler = shlex.split(os.environ.get("CC") or "cc")
        include = f"-I{sysconfig.get_path('include')}"
        command = [
            *compiler,
            "-O2",
            "-fno-plt",
            "-shared",
            "-fPIC",
            include,
            *SOURCES,
            "-o",
            BUILT,
            "-pthread",
            "-lrt",
        ]
        try:
            subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or error
            self.app.display_warning(f"{SOURCES[0]} was not compiled, edges are written in Python: {why}")
            return False
        return True
