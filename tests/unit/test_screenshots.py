"""`make screenshots` says what it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.zero_code import launched
from tools import screenshots

SCRIPT = Path(__file__).parents[2] / "tools" / "screenshots.py"
NO_DAEMON = "#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n"


@pytest.mark.parametrize(
    ("docker", "reason"), [("", "No such file"), (NO_DAEMON, "Cannot connect to the Docker daemon")]
)
def test_without_docker_it_ends_with_a_message(tmp_path: Path, docker: str, reason: str) -> None:
    """A traceback of subprocess does not say what to install."""
    if docker:
        (tmp_path / "docker").write_text(docker)
        (tmp_path / "docker").chmod(0o755)
    command = [sys.executable, str(SCRIPT), "--output-dir", str(tmp_path / "pictures")]
    done = launched(command, {"PATH": str(tmp_path)})

    assert done.returncode == 1
    assert done.stderr.startswith("screenshots: `docker compose ls` failed")
    assert reason in done.stderr
    assert "install Docker" in done.stderr
    assert not (tmp_path / "pictures").exists()


def test_a_daemon_that_does_not_answer_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Docker that hangs must not hang `make screenshots`."""
    (tmp_path / "docker").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(screenshots, "DOCKER_S", 0.2)

    with pytest.raises(SystemExit, match=r"timed out after 0\.2 seconds"):
        screenshots.require_docker()
