"""What several files of this folder begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.loops.truth import Watch


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """``instrument``, quietly; what a test leaves open is closed."""
    started = Watch(tmp_path / "runs")
    yield started
    started.close()
