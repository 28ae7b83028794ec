"""What the doctor finds, with machines, servers and clocks that are as a test wants them."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from otel_train.cli import doctor
from otel_train.config import Config
from otel_train.config.validation import MIB
from otel_train.console.text import TextLayout
from otel_train.doctor import checks, end_to_end, endpoint, environment
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, Check, CheckResult, run, worst_state
from otel_train.doctor.environment import Machine
from otel_train.exporters.spool import SpoolQueue
from otel_train.stack import configuration
from tests.support.command_line import Cli
from tests.support.http_server import http_server
from tests.support.receiver import http_receiver, refusing_address
from tests.support.zero_code import launched

ROOT = Path(__file__).parents[2]
HEALTHY = {"otel-train": "0.1.0", "torch": "2.13.0+cpu", "nvidia-ml-py": "13.0", "msgspec": "0.20"}


def bad(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Those that hurt or may hurt; each must have a remedy."""
    found = [finding for finding in findings if finding.state in {WARNING, PROBLEM}]
    assert all(finding.remedy for finding in found)
    return found


def only(findings: Iterable[CheckResult], state: str) -> CheckResult:
    [finding] = bad(findings)
    assert finding.state == state
    return finding


# --- how checks are run ---------------------------------------------------------------------------


def test_a_check_that_hangs_costs_its_limit_and_keeps_what_it_had() -> None:
    """A dead network file system must not hang the one tool that could say so."""
    release = threading.Event()

    def hangs() -> Iterator[CheckResult]:
        yield CheckResult(OK, "so far")
        release.wait()

    found = run([Check("disk", hangs, 0.2), Check("next", list, 1.0)])
    release.set()

    assert [finding.what for finding in found] == ["so far", "no answer within 0.2 s"]
    assert worst_state(found) == PROBLEM


def test_a_check_that_raises_is_a_finding() -> None:
    """A check that raises does not end the command; the other checks are still made."""

    def faints() -> Iterator[CheckResult]:
        yield CheckResult(OK, "before")
        raise KeyError("x")

    found = run([Check("a", faints, 5.0), Check("b", lambda: [CheckResult(OK, "b")], 5.0)])

    assert [finding.state for finding in found] == [OK, PROBLEM, OK]
    assert "KeyError" in found[1].what


# --- installed ------------------------------------------------------------------------------------


def installation(python: tuple[int, ...] = (3, 12, 1), **changes: str | None) -> list[CheckResult]:
    versions: dict[str, str | None] = {
        **HEALTHY,
        **{name.replace("_", "-"): v for name, v in changes.items()},
    }

    def version(package: str) -> str | None:
        return versions.get(package, "99" if package == "numpy" else environment.installed_version(package))

    return list(
        environment.check_packages(Machine(installed=version, python=python, nvidia=Path(os.devnull)))
    )


def test_a_healthy_installation_has_nothing_wrong() -> None:
    """An alarm for nothing teaches people not to look."""
    assert bad(installation()) == []


@pytest.mark.parametrize(("native", "how"), [(True, "written in C"), (False, "written in Python")])
def test_it_says_how_events_are_written(native: bool, how: str) -> None:
    """A wheel that was built without a compiler works, and costs more per step."""
    found = environment.check_packages(Machine(native=lambda: native))
    said = [each for each in found if each.what.startswith("events ")]

    assert [how in each.what for each in said] == [True]
    assert bool(said[0].remedy) is not native


@pytest.mark.parametrize(("versions", "state", "said"), [
    # The wrong environment is the most common mistake, and it has no torch to import.
    pytest.param({"torch": None}, WARNING, "torch is not installed", id="no torch is a warning, not a crash"),
    # Hooks that are not there fail in mid-run.
    pytest.param({"torch": "2.3.1"}, PROBLEM, "torch 2.3.1", id="an old torch is a problem"),
    # Power and temperature are absent without a word otherwise.
    pytest.param({"nvidia_ml_py": None}, WARNING, "nvml", id="the extra for a device that is there is missed"),
    # The requirement of another package moved it.
    pytest.param({"psutil": "5.0"}, PROBLEM, "psutil 5.0: expected >=5.9", id="a package out of its bounds is named with them"),
])  # fmt: skip
def test_what_is_installed_is_compared_with_what_is_needed(
    versions: dict[str, str | None], state: str, said: str
) -> None:
    """And named with the command that repairs it."""
    finding = only(installation((3, 12, 1), **versions), state)

    assert said in finding.what
    assert ("pip install 'psutil>=5.9'" if "psutil" in versions else "install") in finding.remedy


def test_an_old_python_is_a_problem_and_lacks_what_later_ones_have() -> None:
    """Python has read TOML by itself since 3.11; before, a package does."""
    old = environment.check_packages(
        Machine(installed=HEALTHY.get, python=(3, 9, 2), nvidia=Path("/nowhere"))
    )

    assert "Python 3.9.2" in next(iter(old)).what
    assert "tomli is missing" in only(installation((3, 10, 1), tomli=None), PROBLEM).what
    assert bad(installation(tomli=None)) == []


def test_exporters_of_other_packages_are_listed_and_broken_ones_found() -> None:
    """They run in every training of this environment, and no script names them."""
    values = {"good": "otel_train.testing:Kept", "bad": "otel_train.nowhere:X"}
    points = [EntryPoint(name, value, "otel_train.exporters") for name, value in values.items()]

    every = environment.check_packages(Machine(exporters=lambda: points))
    found = [each for each in every if each.what.startswith("exporter ")]

    error = "cannot be loaded: No module named 'otel_train.nowhere'"
    assert [(finding.state, finding.what) for finding in found] == [
        (OK, "exporter good (otel_train.testing:Kept)"),
        (WARNING, f"exporter bad (otel_train.nowhere:X) {error}"),
    ]
    assert "OTEL_TRAIN_EXPORTERS=off" in found[1].remedy


# --- settings -------------------------------------------------------------------------------------


def test_settings_are_shown_with_where_they_come_from_and_secrets_are_not() -> None:
    """The output lands in bug reports."""
    environ = {
        "OTEL_TRAIN_RUN_NAME": "mine",
        "OTEL_TRAIN_PROFILER_TOKEN": "s3cret",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer s3cret",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:s3cret@host:4318",
        "OTEL_TRAIN_ALERTMANAGER_URL": "http://me:s3cret@alerts:9093",
    }
    text = "\n".join(finding.what for finding in environment.check_settings(environ))

    assert "OTEL_TRAIN_RUN_NAME=mine (environment)" in text
    assert "OTEL_EXPORTER_OTLP_HEADERS=(set, not shown)" in text
    assert "http://***@host:4318" in text
    assert "http://***@alerts:9093" in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("environ", "state", "word"),
    [
        ({"OTEL_TRAIN_FLIGHT_RECORDER_EVENTS": "5"}, PROBLEM, "OTEL_TRAIN_FLIGHT_RECORDER_EVENTS=5"),
        ({"OTEL_TRAIN_RUN_DIRR": "x"}, PROBLEM, "OTEL_TRAIN_RUN_DIRR"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "oops"}, PROBLEM, "OTEL_RESOURCE_ATTRIBUTES: 'oops'"),
        ({"OTEL_TRAIN_CONFIG": "/nowhere.yaml"}, PROBLEM, "OTEL_TRAIN_CONFIG='/nowhere.yaml'"),
        ({"OTEL_TRAIN_DISABLED": "true"}, PROBLEM, "switches everything off"),
        ({"OTEL_SDK_DISABLED": "true"}, WARNING, "switches OTLP off"),
        (
            {"OTEL_TRACES_EXPORTER": "console"},
            WARNING,
            "OTEL_TRACES_EXPORTER=console switches OTLP off for traces",
        ),
        (
            {"OTEL_TRAIN_OTLP": "off", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"},
            WARNING,
            "nothing is sent there",
        ),
    ],
)
def test_a_setting_that_stops_metrics_is_found(environ: dict[str, str], state: str, word: str) -> None:
    """Nothing arrives, and nothing says why."""
    assert word in only(environment.check_settings(environ), state).what


def test_a_setting_that_is_ignored_is_counted_with_the_others() -> None:
    """One line named a variable that is ignored, the next said that there is none from the environment."""
    wrong = {"OTEL_TRAIN_EXPORT_INTERVAL_S": "abc"}
    of = "settings of otel_train: "

    for environ, said in (
        ({}, "none from the environment or a file; "),
        (wrong, "1 ignored (see above); "),
        ({**wrong, "OTEL_TRAIN_RUN_NAME": "mine"}, "1 from the environment, 1 ignored (see above); "),
    ):
        assert list(environment.check_settings(environ))[-1].what.startswith(of + said)


# --- machine --------------------------------------------------------------------------------------


def runs(folder: Path, kind: str = "ext4", free_mib: int = 10_000, **settings: Any) -> list[CheckResult]:
    config = Config(run_dir=str(folder), **settings)
    machine = Machine(
        installed=lambda _: "0.1.0", file_system=lambda _: environment.FileSystem(kind, free_mib * MIB)
    )
    return list(environment.check_run_directory(config, machine))


def test_a_good_disk_has_nothing_wrong_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    """The doctor changes nothing."""
    assert bad(runs(tmp_path / "not" / "there")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_warning_and_a_network_file_system_is_not(tmp_path: Path) -> None:
    """A run that fills its disk shows late, at its end; a file system that waits for a server holds up nothing."""
    assert "100 MiB are free" in only(runs(tmp_path, free_mib=100), WARNING).what
    spool = only(runs(tmp_path, free_mib=300), WARNING).what  # events, metrics and spans alone would fit
    assert "256 MiB (max_run_dir_bytes), 96 MiB for its spool" in spool
    assert bad(runs(tmp_path, free_mib=352)) == []
    assert bad(runs(tmp_path, kind="nfs4")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_a_run_id_whose_folder_another_user_has_is_a_problem(tmp_path: Path) -> None:
    """Two users who share a folder of runs, and name a run alike: the second run would leave nothing."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.symlink_to(mine)
    os.chown(theirs, 54_321, 54_321, follow_symlinks=False)

    assert bad(runs(tmp_path, run_id="mine")) == bad(runs(tmp_path, run_id="new")) == []
    found = only(runs(tmp_path, run_id="theirs"), PROBLEM)
    assert found.what.startswith(f"run_id 'theirs': {tmp_path} has a folder of it: owned by user 54321, ")
    assert "give the run another run_id" in found.remedy


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    """Root may write anywhere, so the folder is one where no user can."""
    finding = only(runs(Path("/proc/otel-train")), PROBLEM)

    assert "/proc/otel-train cannot be written" in finding.what
    assert "OTEL_TRAIN_RUN_DIR" in finding.remedy


@pytest.mark.usefixtures("gone")
def test_a_run_directory_below_a_working_directory_that_is_gone_is_a_problem() -> None:
    """A run there writes no files, and says so once; the doctor asked its user to report a fault."""
    finding = only(runs(Path("runs")), PROBLEM)

    assert finding.what == "runs cannot be made: the working directory is gone"
    assert "change to a folder that exists" in finding.remedy


def test_runs_of_another_version_are_named(tmp_path: Path) -> None:
    """`report` on an old run may refuse; this says why."""
    for name, version in (("old", "0.0.9"), ("new", "0.1.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"version": version}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")

    assert "otel-train 0.0.9; this is 0.1.0" in only(runs(tmp_path), WARNING).what


def test_of_many_runs_the_newest_are_counted_and_it_is_said_so(tmp_path: Path) -> None:
    """Of 34 runs it said "20 runs"."""
    for number in range(environment.LOOKED_AT + 1):
        (tmp_path / f"r{number}").mkdir()
        (tmp_path / f"r{number}" / "run.json").write_text('{"version": "0.1.0"}')

    said = [found.what for found in runs(tmp_path) if "this version" in found.what]

    assert said == ["the newest 20 runs with 0 ranks, all of this version"]


def test_a_run_whose_requests_wait_is_named_with_the_command_that_sends_them(tmp_path: Path) -> None:
    """The doctor found no problems in a folder with a run of which nothing had arrived."""
    for name in ("sent", "my run"):
        (tmp_path / name / "rank0").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text('{"version": "0.1.0"}')
    for signal, number in (("metrics", 2), ("traces", 1)):
        queue = SpoolQueue(tmp_path / "my run" / "rank0", signal)
        for _ in range(number):
            queue.append(b"{}")
        queue.close()

    found = only(runs(tmp_path), WARNING)

    assert found.what == f"{tmp_path}/my run: 3 requests wait in the spool"
    assert found.remedy == f"otel-train replay '{tmp_path}/my run' sends them to the Collector"


def machinery(folder: Path, shm_mib: int = 4096, **settings: Any) -> list[CheckResult]:
    config = Config(**{"prometheus_address": "127.0.0.1:0", **settings})
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    machine = Machine(shm=folder, file_system=lambda _: environment.FileSystem("tmpfs", shm_mib * MIB))
    return list(environment.check_machine(config, environ, machine))


def test_little_shared_memory_is_a_warning_with_the_option_that_helps(tmp_path: Path) -> None:
    """Docker gives 64 MiB; the loader dies of a bus error."""
    assert bad(machinery(tmp_path)) == []
    assert "--shm-size" in only(machinery(tmp_path, shm_mib=64), WARNING).remedy


def test_a_taken_port_is_a_note_and_an_address_of_another_machine_a_problem(tmp_path: Path) -> None:
    """The first is usual (another run), the second never works."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = machinery(tmp_path, prometheus_address=f"127.0.0.1:{taken.getsockname()[1]}")
    assert [f.state for f in found if "is taken" in f.what] == [NOTE]
    elsewhere = only(machinery(tmp_path, prometheus_address="192.0.2.1:9464"), PROBLEM)
    assert os.strerror(errno.EADDRNOTAVAIL) in elsewhere.what


def test_forking_beside_grpc_is_noted(tmp_path: Path) -> None:
    """It can hang, seldom, and then looks like anything but this."""
    assert any(f.state == NOTE and "gRPC" in f.what for f in machinery(tmp_path))


# --- endpoint -------------------------------------------------------------------------------------


def looked_at(address: str, **environ: str) -> list[CheckResult]:
    return list(endpoint.check_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": address, **environ}))


def test_no_endpoint_is_a_note() -> None:
    """A run that is scraped sends nothing, and that is fine."""
    [finding] = endpoint.check_endpoint({})

    assert finding.state == NOTE
    assert "no OTLP endpoint is set" in finding.what


def test_an_endpoint_that_answers_has_nothing_wrong() -> None:
    """Its clock is compared by the way."""
    with http_receiver() as receiver:
        found = looked_at(receiver.endpoint)

    assert bad(found) == []
    assert any("takes connections" in finding.what for finding in found)


def test_an_address_that_refuses_connections_is_a_problem_and_a_typing_mistake_another() -> None:
    """Each has its own message."""
    with refusing_address() as address:
        finding = only(looked_at(address), PROBLEM)
    other = looked_at("http://h:1", OTEL_EXPORTER_OTLP_PROTOCOL="http/xml")

    assert "refuses connections" in finding.what
    assert "otel-train stack up" in finding.remedy
    assert "cannot be resolved" in only(looked_at("http://no-such-host.invalid:4318"), PROBLEM).what
    assert "http/protobuf" in only(other, PROBLEM).what


class Redirecting(BaseHTTPRequestHandler):
    """Redirects ``/there?URL`` to that URL; elsewhere answers with the authorization of the request."""

    def do_GET(self) -> None:
        path, _, url = self.path.partition("?")
        self.send_response(302 if url else 200)
        self.send_header("Location", url or path)
        self.end_headers()
        self.wfile.write(self.headers.get("Authorization", "none").encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def redirecting() -> Iterator[int]:
    """The port of such a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("host", "sent"), [("127.0.0.1", b"Bearer secret"), ("localhost", b"none")])
def test_a_redirect_to_another_host_does_not_get_the_token(redirecting: int, host: str, sent: bytes) -> None:
    """Grafana's token opens its dashboards and data sources."""
    url = f"http://127.0.0.1:{redirecting}/there?http://{host}:{redirecting}/"

    assert checks.get(url, {"Authorization": "Bearer secret"}).body == sent


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_service_of_this_machine_is_not_asked_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch, redirecting: int, host: str
) -> None:
    """A cluster sets ``http_proxy``, often without ``no_proxy``; the proxy's own loopback is another machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it has the proxies of its first use
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    assert checks.get(f"http://{host}:{redirecting}/").ok
    assert configuration.healthy(f"http://{host}:{redirecting}/")


def test_a_token_that_would_leave_this_machine_in_the_clear_is_a_warning() -> None:
    """Whoever reads the network reads the token. Loopback is not on the network."""
    with http_receiver() as receiver:
        near = looked_at(receiver.endpoint, OTEL_EXPORTER_OTLP_HEADERS="authorization=x")
        settings = endpoint.settings_with_targets({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})
        assert settings is not None
        [(signal, place)] = endpoint.endpoints(settings)
        # 0.0.0.0 reaches this machine by an address that is not loopback's.
        far = replace(place, url=place.url.replace("127.0.0.1", "0.0.0.0"))
        found = endpoint.look_at(signal, far, token=True)
        assert "without encryption" in only(found, WARNING).what
    assert bad(near) == []


@pytest.mark.parametrize(("ahead_s", "state"), [(0.6, OK), (-4, OK), (30, WARNING), (-3600, PROBLEM)])
def test_a_clock_that_is_off_is_as_bad_as_it_is_far_off(ahead_s: float, state: str) -> None:
    """Prometheus refuses samples from the future, and those too old."""
    with http_receiver(ahead_s=ahead_s) as receiver:
        found = looked_at(receiver.endpoint)

    assert worst_state(found) == state
    if state != OK:
        assert ("ahead of" if ahead_s > 0 else "behind") in bad(found)[0].what


# --- end to end -----------------------------------------------------------------------------------


class Backend:
    """Stands for Prometheus, a trace store and Grafana: has whatever the test puts there."""

    def __init__(self) -> None:
        self.url = ""
        self.has = True
        self.asked: list[str] = []
        self.authorization = ""


@contextmanager
def backend() -> Iterator[Backend]:
    made = Backend()

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> tuple[int, bytes]:
        made.asked.append(request.path)
        made.authorization = request.headers.get("Authorization") or made.authorization
        found: list[Any] = []
        if "time()" in request.path:
            found = [time.time(), str(time.time())]
        elif made.has and "train_probe_time_seconds" in request.path:
            found = [{}]
        body = json.dumps({"status": "success", "data": {"result": found}})
        if made.has and request.path.startswith("/api/traces/"):
            # A trace has the id of its run in it; any would do for a server that only knows one.
            body = " ".join(made.asked) + run_ids(made)
        return 200, body.encode()

    with http_server(answer) as made.url:
        yield made


def run_ids(made: Backend) -> str:
    """The id that the probe's query named."""
    return " ".join(path for path in made.asked if "doctor-" in path)


def sent_to(
    address: str, made: Backend | None, *, named: bool = True, token: str = "", wait_s: float = 5.0
) -> list[CheckResult]:
    kinds = (end_to_end.PROMETHEUS, end_to_end.TRACES, end_to_end.GRAFANA)
    urls = dict.fromkeys(kinds, made.url) if made else {}
    places = end_to_end.ProbeTargets(urls=urls, named=frozenset(kinds if named else ()), grafana_token=token)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": address} if address else {}
    return list(end_to_end.check_end_to_end(environ, places, endpoint=address, wait_s=wait_s))


def test_what_was_sent_is_marked_and_found_in_every_place() -> None:
    """The whole way at once: the only proof that metrics arrive."""
    with http_receiver() as receiver, backend() as made:
        found = sent_to(receiver.endpoint, made, token="t0ken")
        sent = receiver.metrics[0].resource_metrics[0]

    assert bad(found) == []
    assert sum("found in" in finding.what for finding in found) == 3
    assert made.authorization == "Bearer t0ken"
    assert [metric.name for metric in sent.scope_metrics[0].metrics] == ["train.probe.time"]
    assert [span.name for span in receiver.spans()] == ["train.probe"]
    run_id = {a.key: a.value.string_value for a in sent.resource.attributes}["train.run.id"]
    assert run_id.startswith("doctor-")
    assert any(run_id in path for path in made.asked)


def test_what_does_not_arrive_is_a_problem_with_where_to_look() -> None:
    """Accepted is not arrived."""
    with http_receiver() as receiver, backend() as made:
        made.has = False
        found = bad(sent_to(receiver.endpoint, made, wait_s=0.2))

    assert [finding.what.split(" within")[0] for finding in found] == [
        f"not found in {place}" for place in ("Prometheus", "trace store")
    ]
    assert all("otel-train stack logs" in finding.remedy for finding in found)


def test_a_refusal_is_shown_with_its_remedy_and_nothing_is_waited_for() -> None:
    """There is nothing to arrive."""
    with http_receiver("401") as receiver, backend() as made:
        found = bad(sent_to(receiver.endpoint, made, wait_s=60))

    assert len(found) == 2
    assert all("refuses the token" in finding.what for finding in found)
    assert all("OTEL_EXPORTER_OTLP_HEADERS" in finding.remedy for finding in found)


def test_a_place_that_is_silent_is_a_problem_only_if_it_was_named() -> None:
    """Grafana is optional on this machine."""
    with http_receiver() as receiver, refusing_address() as address:
        away = Backend()
        away.url = address
        unnamed = sent_to(receiver.endpoint, away, named=False)
        named = sent_to(receiver.endpoint, away)

    assert bad(unnamed) == []
    assert {finding.state for finding in named if "does not answer" in finding.what} == {PROBLEM}


def test_without_an_endpoint_nothing_is_sent_and_only_what_was_named_is_looked_at() -> None:
    """A run that is scraped needs no message about a stack that is not there."""
    with backend() as made:
        assert sent_to("", made, named=False) == []
        assert any("Prometheus is ready" in finding.what for finding in sent_to("", made))


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments and an environment in which nothing of this machine is met."""
    monkeypatch.setenv("OTEL_TRAIN_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("OTEL_TRAIN_PROMETHEUS_ADDRESS", "127.0.0.1:0")
    return ["doctor", "--state", str(tmp_path / "state")]


def test_the_exit_code_and_the_document_agree(
    quiet_machine: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """For scripts: a job's prolog can refuse to start."""
    with refusing_address() as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        ended = cli(*quiet_machine, "--wait", "0", "--json")
    document = json.loads(ended.out)

    assert ended.code == document["exit_code"] == 2
    assert document["schema"] == "otel_train.doctor/1"
    [first, *_] = (finding for finding in document["findings"] if finding["state"] == "problem")
    assert first["area"] == "endpoint"


def test_a_pipe_gets_no_colours_and_ascii_where_nothing_else_is_written(quiet_machine: list[str]) -> None:
    """Logs of schedulers are often neither terminals nor UTF-8."""
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = launched([sys.executable, "-m", "otel_train", *quiet_machine], variables, ROOT)

    assert (done.returncode in {0, 1}, done.stderr) == (True, "")
    assert "\x1b" not in done.stdout
    assert "no OTLP endpoint is set" in done.stdout


def test_a_terminal_gets_marks_and_every_remedy_below_its_finding() -> None:
    """What to do is the reason to run it."""
    broken = CheckResult(PROBLEM, "broken " * 30, remedy="repair it", area="b")
    text = doctor.lines([CheckResult(OK, "well", area="a"), broken], TextLayout(width=80, color=True))

    assert any("\x1b[31m✖" in line for line in text)
    assert "    → repair it" in text
    assert all(len(line) <= 90 for line in text)


def test_it_works_without_torch(quiet_machine: list[str]) -> None:
    """It is run first where nothing works yet."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from otel_train.cli.main import main\n"
        f"sys.exit(main({quiet_machine!r}))\n"
    )
    done = launched([sys.executable, "-c", code], os.environ, ROOT)

    assert done.returncode in {0, 1}, done.stderr
    assert "installed" in done.stdout


def test_a_token_file_that_cannot_be_read_is_refused(
    quiet_machine: list[str], tmp_path: Path, cli: Cli
) -> None:
    """Asking Grafana without it would fail with a riddle."""
    ended = cli(*quiet_machine, "--grafana-token-file", tmp_path / "none")

    assert "--grafana-token-file" in ended.refused
