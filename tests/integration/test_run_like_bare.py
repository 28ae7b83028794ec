"""A program below ``otel-train run`` cannot tell that a launcher started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.zero_code import LIMIT_S, environment

BARE = [sys.executable, "-X", "utf8"]
OURS = [*BARE, "-m", "otel_train", "run"]

SCRIPTS = {
    "seen": """
        import os, signal, sys
        print(sys.argv, __name__, __file__, sys.path[:1], sys.flags, __spec__, os.getcwd())
        print([m for m in sys.modules if m.startswith(("otel_train", "numpy", "torch"))])
        print([(n, signal.getsignal(n)) for n in sorted(signal.valid_signals())], signal.pthread_sigmask(0, []))
    """,
    "stdin": "import sys; print(sys.stdin.read().upper(), sys.stdin.isatty())",
    "exit code": "import sys; sys.exit(3)",
    "exception": "def f(): raise ValueError('x')\nf()",
    "os._exit": "import os; print('lost?', flush=True); os._exit(5)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminates itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "starts itself again": """
        import subprocess, sys
        print(sys.argv)
        if len(sys.argv) < 3:
            sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[1:], "again"]).returncode + 1)
    """,
    "spawns": """
        import multiprocessing
        def f(x):
            return x + 1
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(f, [1, 2]))
    """,
}


def outcome(command: Sequence[str], folder: Path, **more: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command in a folder."""
    done = subprocess.run(
        command, cwd=folder, env=environment(**more), input="some text", capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_behaves_as_without_us(name: str, tmp_path: Path) -> None:
    """Exit code, output and tracebacks, word by word."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]), encoding="utf-8")

    bare = outcome([*BARE, "script.py", "--run-id", "a b"], tmp_path)

    assert outcome([*OURS, "script.py", "--run-id", "a b"], tmp_path) == bare


def test_a_module_behaves_as_without_us(tmp_path: Path) -> None:
    """Relative imports, `__spec__` and `sys.path[0]` are those of `python -m`."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("X = 1")
    (package / "train.py").write_text(
        "import sys\nfrom .other import X\nprint(sys.argv, __name__, __spec__.name, sys.path[:1], X)"
    )
    bare = outcome([*BARE, "-m", "package.train", "-m", "x"], tmp_path)

    assert bare[0] == 0
    assert outcome([*OURS, "-m", "package.train", "-m", "x"], tmp_path) == bare


def test_a_command_behaves_as_without_us(tmp_path: Path) -> None:
    """Console scripts and shell scripts are started as they are."""
    script = tmp_path / "job.sh"
    script.write_text(
        f'#!/bin/sh\necho "$@" "$0"\n{sys.executable} -c "import sys; print(sys.argv)" x\nexit 4\n'
    )
    script.chmod(0o755)

    assert outcome([*OURS, "./job.sh", "a"], tmp_path) == outcome(["./job.sh", "a"], tmp_path)


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    """Proxies, certificates and coverage live there; and its faults are reported by Python as ever."""
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "script.py").write_text(
        "import sys; print(sys.modules['sitecustomize'].__file__, sys.path[1:3])"
    )
    path = os.pathsep.join((str(site), environment()["PYTHONPATH"]))
    for text in ("print('theirs')", "raise ValueError('theirs')"):
        (site / "sitecustomize.py").write_text(text)
        bare = outcome([*BARE, "script.py"], tmp_path, PYTHONPATH=path)
        ours = outcome([*OURS, "script.py"], tmp_path, PYTHONPATH=path)
        assert "theirs" in bare[1] + bare[2]
        assert ours[0] == bare[0]
        assert ours[1].endswith(bare[1])  # the launcher is a Python too: it has run there before
        assert ours[2].endswith(bare[2])


def test_a_launch_that_fails_to_observe_runs_the_program(tmp_path: Path) -> None:
    """One line says so, and training goes on."""
    (tmp_path / "torch.py").write_text("print('torch')")  # a torch without anything in it
    (tmp_path / "script.py").write_text("import torch; print('done')")

    code, output, errors = outcome([*OURS, "script.py"], tmp_path)

    assert (code, output) == (0, "torch\ndone\n")
    assert errors.count("\n") == 1
    assert "without instrumentation" in errors


def test_without_a_temporary_folder_the_program_runs(tmp_path: Path) -> None:
    """A container with a read-only root, or a full disk; here no file may grow."""
    words = 'ulimit -f 0; exec "$0" -m otel_train run "$0" -c "print(7)"'
    command = ["/bin/sh", "-c", words, sys.executable]
    code, said, errors = outcome(command, tmp_path)

    assert (code, said) == (0, "7\n"), errors
    assert errors.count("Set TMPDIR") == errors.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "export_interval_s=never", "script.py"], "expected a number"),
        (["--set", "nonsense=1", "script.py"], "--set nonsense=1"),
        (["missing.py"], "no such file"),
        (["-m"], "name of a module"),
        ([], "nothing to run"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    """Exit code 2, and nothing ran."""
    (tmp_path / "script.py").write_text("print('ran')")

    code, output, errors = outcome([*OURS, *words], tmp_path)

    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert says in errors


def test_switched_off_it_leaves_no_trace(tmp_path: Path) -> None:
    """The environment of the program is the user's."""
    (tmp_path / "script.py").write_text("import os; print(sorted(os.environ.items()))")
    bare = outcome([*BARE, "script.py"], tmp_path, OTEL_TRAIN_DISABLED="true")

    assert outcome([*OURS, "script.py"], tmp_path, OTEL_TRAIN_DISABLED="true") == bare


# --- signals ---------------------------------------------------------------------------------------

WAITS = """
    import signal, sys, time
    got = []
    for name in sys.argv[1:]:
        signal.signal(getattr(signal, name), lambda n, f: got.append(signal.Signals(n).name))
    print("ready", flush=True)
    end = time.monotonic() + 60
    while not got and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    print(got, flush=True)
"""


def started(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """A program of its own process group that has said that it is ready."""
    (folder / "script.py").write_text(textwrap.dedent(WAITS), encoding="utf-8")
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("name", "handled"),
    [("SIGTERM", False), ("SIGTERM", True), ("SIGHUP", False), ("SIGINT", True), ("SIGUSR1", True)],
)
def test_a_signal_reaches_the_program_and_its_effect_whoever_waits(
    name: str, tmp_path: Path, *, handled: bool
) -> None:
    """Schedulers send SIGUSR1 before they kill, and look at how a job died."""
    ends = []
    for command in (BARE, OURS):
        process = started([*command, "script.py", *([name] if handled else [])], tmp_path)
        process.send_signal(getattr(signal, name))
        output, errors = process.communicate(timeout=LIMIT_S)
        ends.append((process.returncode, output, errors.replace(" Signal", "")))

    assert ends[0] == ends[1]
    assert ends[0][1] == (f"['{name}']\n" if handled else "")


def test_a_launcher_that_is_killed_leaves_no_orphan(tmp_path: Path) -> None:
    """A process without a parent that waits for it holds a GPU until it is killed manually."""
    process = started([*OURS, "script.py", "SIGTERM"], tmp_path)
    [child] = psutil.Process(process.pid).children()

    process.kill()
    process.communicate(timeout=LIMIT_S)

    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_ctrl_c_reaches_the_program_once(tmp_path: Path) -> None:
    """A terminal sends it to the whole group; who passes it on again interrupts the saving of a checkpoint."""
    import pty

    (tmp_path / "script.py").write_text(textwrap.dedent(WAITS), encoding="utf-8")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(OURS[0], [*OURS, "script.py", "SIGINT"], environment())
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    try:
        while b"]" not in shown:
            shown += os.read(terminal, 1024)
    except OSError:  # the other side has gone
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)

    assert b"['SIGINT']" in shown
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_stopped_program_goes_on(tmp_path: Path) -> None:
    """A shell stops and continues the whole group; SIGTSTP itself spares a group without one."""
    process = started([*OURS, "script.py", "SIGUSR1"], tmp_path)
    os.killpg(process.pid, signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.killpg(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGUSR1)

    assert process.communicate(timeout=LIMIT_S)[0] == "['SIGUSR1']\n"
    assert process.returncode == 0
