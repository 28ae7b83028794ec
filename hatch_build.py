"""Puts the files of the stack into the wheel, where an installed package finds them."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = (".env", "docker-compose.yml", "deploy", "grafana")


class StackFiles(BuildHookInterface):  # type: ignore[misc,type-arg]  # hatchling is here only while building
    """They lie at the top of the repository, where ``docker compose`` looks; an editable install reads them there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel, unless it only points at this checkout."""
        if version != "editable":
            build_data["force_include"].update({name: f"otel_train/stack/files/{name}" for name in CARRIED})
