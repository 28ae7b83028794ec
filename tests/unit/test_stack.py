"""The stack: found, configured, started and stopped; with programs that only pretend."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import yaml

from otel_train.errors import ConfigError, StackError
from otel_train.stack import configuration, local
from otel_train.stack.compose import Compose
from otel_train.stack.configuration import Ports, write_alertmanager
from otel_train.stack.local import LocalStack
from tests.support.command_line import Cli
from tests.support.stack import ROOT, SCALE, free_ports, hurry
from tests.support.waiting import until
from tools.alerts_pages import ALERT_FILES, rules

PRETENDER = f"""\
#!{sys.executable} -SE
import http.server, os, sys
address = os.environ.get(ADDRESS) or [w for w in sys.argv if w.startswith("--web.listen")][0].partition("=")[2]
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
host, _, port = address.partition(":")
print("pretending", flush=True)
http.server.HTTPServer((host, int(port)), Well).serve_forever()
"""


def script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def pretenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of programs that answer as if they were well, and do nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, address in (
        ("otelcol-train", "COLLECTOR_HEALTH"),
        ("prometheus", "NOT_SET"),
        ("alertmanager", "NOT_SET"),
        ("jaeger", "JAEGER_HEALTH"),
    ):
        script(folder / name, PRETENDER.replace("ADDRESS", repr(address)))
    monkeypatch.setenv("OTEL_TRAIN_TEST_BIN", str(folder))
    return folder


@pytest.fixture
def stack(tmp_path: Path, pretenders: Path) -> Iterator[LocalStack]:
    made = LocalStack(tmp_path / "state", free_ports())
    made.configure()
    yield made
    made.stop()


def test_every_alert_that_is_held_goes_on_after_a_restart_of_prometheus(stack: LocalStack) -> None:
    """Prometheus restores those alone that are held as long as the grace period: the others would page a second time."""
    stack.start(say=lambda _line: None)
    ours = f"--storage.tsdb.path={stack.state}/"
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    [local] = [command for command in commands if any(word.startswith(ours) for word in command)]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    held_min = {float(rule["for"].removesuffix("m")) for rule in rules(*ALERT_FILES).values()} - {0}

    assert min(held_min) >= 1
    for command in (local, services["prometheus"]["command"]):
        assert "--rules.alert.for-grace-period=1m" in command


def test_a_stack_starts_is_well_and_stops(stack: LocalStack) -> None:
    """Senders stop first, so that nothing is left waiting to be sent."""
    said: list[str] = []
    stack.start(say=said.append)

    assert set(stack.states().values()) == {"ready"}
    assert len(said) == 4
    assert stack.stop() == ["collector", "prometheus", "alertmanager", "jaeger"]
    assert set(stack.states().values()) == {"down"}


def test_a_second_start_names_the_first(stack: LocalStack) -> None:
    """Two stacks on one folder would write into each other's data."""
    stack.start("prometheus")

    with pytest.raises(StackError, match=r"running already \(prometheus;"):
        LocalStack(stack.state, free_ports()).configure()


def test_what_a_stopped_stack_kept_can_be_removed_later(tmp_path: Path, pretenders: Path, cli: Cli) -> None:
    """`down`, and the day after `down --data`."""
    (tmp_path / "old" / "data").mkdir(parents=True)

    assert "removed" in cli("stack", "down", "--data", "--state", tmp_path / "old").printed
    assert not (tmp_path / "old" / "data").exists()


def test_another_process_finds_and_stops_it(stack: LocalStack) -> None:
    """`down` is typed in another terminal than `up`."""
    stack.start("prometheus")
    other = LocalStack.of(stack.state)

    assert other is not None
    assert other.states()["prometheus"] == "ready"
    assert other.stop() == ["prometheus"]


def test_what_answers_in_another_protocol_is_not_healthy() -> None:
    """Another service has the port: ``stack status`` says that the part is down, and does not end with an error."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1 << 10)

        thread = threading.Thread(target=answer)
        thread.start()
        healthy = configuration.healthy(f"http://127.0.0.1:{other.getsockname()[1]}/")
        thread.join()

    assert not healthy


def test_a_part_that_ends_at_once_is_shown_with_its_last_words(stack: LocalStack, pretenders: Path) -> None:
    """The reason is in its log; the message quotes the log."""
    script(pretenders / "prometheus", "#!/bin/sh\necho the disk is full\nexit 3\n")

    with pytest.raises(StackError, match=r"prometheus ended at once with code 3; .*the disk is full"):
        stack.start("prometheus")


def test_a_pid_that_another_process_reuses_is_left_alone(stack: LocalStack) -> None:
    """A stale pid file must not kill a stranger: here, this test."""
    stranger = {"pid": os.getpid(), "began_s": psutil.Process().create_time() - 100}
    (stack.state / "pid").mkdir()
    (stack.state / "pid" / "prometheus.json").write_text(json.dumps(stranger))

    assert local.running(stack.state, "prometheus") is None
    assert not local.stop(stack.state, "prometheus")


def test_taken_ports_are_named_before_anything_starts(tmp_path: Path, pretenders: Path) -> None:
    """Half a stack that fails in its third log line is worse than none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = LocalStack(tmp_path / "state", free_ports().changed([f"prometheus={port}"]))
        with pytest.raises(StackError, match=rf"prometheus={port}.*--port"):
            made.configure()
    assert not (tmp_path / "state" / "stack.json").exists()


@pytest.mark.parametrize(
    "word", ["prometheus", "prometheus=0", "prometheus=70000", "prometheus=x", "grafana=1"]
)
def test_a_port_that_is_none_is_refused(word: str) -> None:
    """With the names that there are, or the range."""
    with pytest.raises(ConfigError, match="expected"):
        Ports().changed([word])


def test_only_addresses_differ_from_the_shipped_files(stack: LocalStack) -> None:
    """What is tested here is what containers run."""
    shipped = configuration.folder() / "deploy" / "prometheus"
    conf = stack.state / "conf"

    assert (conf / "prometheus.yml").read_text() == (shipped / "prometheus.yml").read_text()
    for path in (shipped / "rules").glob("*.yml"):
        assert (conf / "rules" / path.name).read_text() == path.read_text()
    for path in (shipped / "targets").glob("*.yml"):
        assert (
            str(stack.ports.prometheus) in (conf / "targets" / path.name).read_text()
            or path.stem != "prometheus"
        )


def test_a_webhook_goes_into_every_receiver_and_nowhere_else(tmp_path: Path) -> None:
    """The rest of the file is the one that ships."""
    shipped = (configuration.folder() / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
    write_alertmanager(tmp_path / "silent.yml", "")
    write_alertmanager(tmp_path / "loud.yml", "http://127.0.0.1:1/x?token=a'b\"c")
    loud = (tmp_path / "loud.yml").read_text()

    assert (tmp_path / "silent.yml").read_text() == shipped
    assert loud.count("webhook_configs") == 3
    assert [line for line in loud.splitlines() if "webhook_configs" not in line] == shipped.splitlines()


@pytest.mark.parametrize("url", ["localhost:5001", "ftp://host/x", "http://"])
def test_a_webhook_that_is_no_address_is_refused(tmp_path: Path, url: str) -> None:
    """Alertmanager would say so in a log, at the first alert."""
    with pytest.raises(ConfigError, match="expected an address"):
        write_alertmanager(tmp_path / "alertmanager.yml", url)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9464/metrics", "127.0.0.1", "127.0.0.1:x", "h:9464/metrics", "h:99999", ""]
)
def test_an_address_that_prometheus_cannot_scrape_is_refused(tmp_path: Path, address: str) -> None:
    """The run summary shows the URL of /metrics. Prometheus starts without such a target, and says so in its log alone."""
    with pytest.raises(ConfigError, match="expected host:port"):
        configuration.render(tmp_path, configuration.Ports(), scrape=["127.0.0.1:9464", address])


def test_a_missing_program_says_how_to_get_it(tmp_path: Path) -> None:
    """The first thing a new user meets."""
    environ = {"OTEL_TRAIN_TEST_BIN": str(tmp_path), "PATH": str(tmp_path)}

    with pytest.raises(StackError, match=r"jaeger: no program jaeger in .*tools/get_components.sh"):
        local.find("jaeger", environ)


def test_what_is_there_is_started_and_what_is_missing_is_said(
    tmp_path: Path, pretenders: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Jaeger nothing was started at all."""
    (pretenders / "jaeger").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    state = ["--state", tmp_path / "typed"]

    up = subprocess.run(typed(tmp_path / "typed", "--detach"), capture_output=True, text=True, check=False)
    assert up.returncode == 0, up.stderr
    assert up.stdout.count("ready") == 3
    assert "jaeger         missing: spans wait in the Collector's queue" in up.stdout
    assert "tools/get_components.sh" in up.stdout
    assert "Jaeger  " not in up.stdout

    status = cli("stack", "status", *state)
    assert status.code == 1
    assert "jaeger         missing" in status.out
    assert cli("stack", "down", "--data", *state).printed.count("stopped") == 3


def test_a_part_that_was_named_must_be_there(
    stack: LocalStack, pretenders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for one wants that one."""
    (pretenders / "jaeger").unlink()
    monkeypatch.setenv("PATH", str(pretenders))
    with pytest.raises(StackError, match="jaeger: no program"):
        stack.start("prometheus", "jaeger")


def test_without_any_part_the_error_names_the_install_script(tmp_path: Path) -> None:
    """An empty stack must not say that it is up."""
    environ = {"OTEL_TRAIN_TEST_BIN": str(tmp_path), "PATH": str(tmp_path)}
    with pytest.raises(StackError, match=r"nothing to start.*tools/get_components.sh"):
        LocalStack(tmp_path / "state", free_ports(), environ).configure()


def test_a_program_on_path_is_good_enough(tmp_path: Path) -> None:
    """Under the name that Debian gives it, too."""
    script(tmp_path / "prometheus-alertmanager", "#!/bin/sh\n")
    environ = {"OTEL_TRAIN_TEST_BIN": str(tmp_path / "cache"), "PATH": str(tmp_path)}

    assert local.find("alertmanager", environ) == tmp_path / "prometheus-alertmanager"


def test_the_shipped_prometheus_reads_targets_soon_and_takes_a_day_of_old_samples() -> None:
    """A target file was seen after 5 minutes, and a spool of 40 minutes was refused."""
    shipped = yaml.safe_load(
        (configuration.folder() / "deploy" / "prometheus" / "prometheus.yml").read_text()
    )
    jobs = [*shipped["scrape_configs"], *shipped["alerting"]["alertmanagers"]]
    found = [each for job in jobs for each in job["file_sd_configs"]]

    assert len(found) == 7
    assert {each["refresh_interval"] for each in found} == {"15s"}
    assert shipped["storage"]["tsdb"]["out_of_order_time_window"] == "24h"


def test_grafana_is_not_the_version_that_breaks_provisioning() -> None:
    """13.2.0 does."""
    assert configuration.settings({})["GRAFANA_VERSION"] == "13.2.2"


def test_the_environment_wins_over_the_file_of_settings() -> None:
    """As it does for Compose."""
    assert configuration.settings({})["PROMETHEUS_PORT"] == "9090"
    assert configuration.settings({"PROMETHEUS_PORT": "1"})["PROMETHEUS_PORT"] == "1"
    assert Ports.of(configuration.settings({})) == Ports()


DOCKER = """\
#!/bin/sh
if [ "$*" = "compose version" ]; then exit 0; fi
echo "TRACES=$TRACES $*" >>"$SAID"
exit ${CODE:-0}
"""


@pytest.fixture
def docker(tmp_path: Path) -> dict[str, str]:
    """An environment with a docker that writes down what it is asked."""
    script(tmp_path / "docker", DOCKER)
    return {"PATH": f"{tmp_path}:/bin:/usr/bin", "SAID": str(tmp_path / "said")}


def test_compose_gets_the_shipped_file_profiles_and_store(docker: dict[str, str]) -> None:
    """From whatever folder it is called."""
    Compose({"TRACES": "jaeger"}, docker).up(["demo"])
    said = Path(docker["SAID"]).read_text()

    assert said.startswith("TRACES=jaeger compose --project-directory")
    assert f"--file {configuration.folder() / 'docker-compose.yml'} --profile demo up --detach" in said


def test_down_takes_the_profiles_with_it_and_keeps_the_data(docker: dict[str, str]) -> None:
    """Compose leaves running what belongs to a profile that it did not receive."""
    Compose({}, docker).down(data=False)
    said = Path(docker["SAID"]).read_text()

    assert "--profile demo --profile gpu down" in said
    assert "--volumes" not in said


def test_a_compose_that_fails_is_an_error_with_a_remedy(docker: dict[str, str]) -> None:
    """Most often the engine is not there."""
    with pytest.raises(StackError, match=r"code 7.*stack up --local"):
        Compose({}, {**docker, "CODE": "7"}).status()


def test_no_compose_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """A training machine often has no container engine."""
    with pytest.raises(StackError, match=r"stack up --local"):
        Compose({}, {"PATH": str(tmp_path)})


@pytest.mark.parametrize("words", ["--local --traces=tempo", "--local --demo", "--detach", "--port=x=1"])
def test_options_that_contradict_each_other_are_refused(words: str, tmp_path: Path, cli: Cli) -> None:
    """Ignoring half of what was asked for looks like success."""
    assert "--local" in cli("stack", "up", *words.split(), "--state", tmp_path).refused


def typed(state: Path, *words: str) -> list[str]:
    """``otel-train stack up --local`` as a process of its own, on free ports."""
    ports = [f"--port={name}={port}" for name, port in asdict(free_ports()).items()]
    command = [sys.executable, "-m", "otel_train", "stack", "up", "--local"]
    return [*command, *ports, "--state", str(state), *words]


def test_the_command_starts_shows_and_stops_a_stack(tmp_path: Path, pretenders: Path, cli: Cli) -> None:
    """The whole of it, as typed."""
    state = ["--state", tmp_path / "typed"]
    up = subprocess.run(typed(tmp_path / "typed", "--detach"), capture_output=True, text=True, check=True)

    assert "send OTLP to" in up.stdout
    assert cli("stack", "status", *state).printed.count("ready") == 4
    assert "pretending" in cli("stack", "logs", "jaeger", *state).printed
    assert cli("stack", "down", "--data", *state).printed.count("stopped") == 4
    assert not (tmp_path / "typed" / "data").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_stop_every_part(
    tmp_path: Path, pretenders: Path, number: signal.Signals
) -> None:
    """Nothing is left listening on the ports."""
    with subprocess.Popen(typed(tmp_path / "typed"), stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        while "Ctrl-C stops it." not in up.stdout.readline():
            assert up.poll() is None
        up.send_signal(number)
        said = up.stdout.read()
    assert up.returncode == 0
    assert said.count("stopped") == 4
    assert not list((tmp_path / "typed" / "pid").iterdir())


def test_a_stack_under_nohup_outlives_its_terminal(tmp_path: Path, pretenders: Path) -> None:
    """`nohup otel-train stack up --local &` stopped when the terminal was closed."""
    command = ["nohup", *typed(tmp_path / "typed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as up:
        assert up.stdout is not None
        while "Ctrl-C stops it." not in up.stdout.readline():
            assert up.poll() is None
        up.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            up.wait(1)
        up.send_signal(signal.SIGTERM)
        said = up.stdout.read()
    assert up.returncode == 0
    assert said.count("stopped") == 4


def test_a_part_whose_pid_file_cannot_be_written_does_not_run_on(stack: LocalStack) -> None:
    """A full disk, say. No `down` would have found it, and it kept its ports."""
    in_its_place = stack.state / "pid" / "prometheus.json"
    in_its_place.mkdir(parents=True)
    with pytest.raises(
        StackError, match=r"prometheus was stopped again: .*prometheus.json cannot be written"
    ):
        stack.start()
    in_its_place.rmdir()
    stack.stop()

    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if any(str(stack.state) in word for word in command)]


def test_ctrl_c_while_a_detached_stack_starts_is_no_success(tmp_path: Path, pretenders: Path) -> None:
    """`stack up --local --detach && torchrun ...` began to train beside a stack that was stopped again."""
    script(pretenders / "jaeger", f"#!{sys.executable} -SE\nimport time\ntime.sleep(60)\n")  # never ready
    with subprocess.Popen(typed(tmp_path / "typed", "--detach"), stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        until((tmp_path / "typed" / "pid" / "jaeger.json").exists)
        up.send_signal(signal.SIGTERM)
        said = up.stdout.read()

    assert up.returncode == 130
    assert said.count("stopped") == 4


def test_a_hurried_file_differs_in_durations_alone() -> None:
    """The rules that tests provoke are the rules that ship, only sooner."""
    text = "for: 15m\nexpr: rate(x_total[5m] offset 1h) > 0.2 and y5m > 300\n  group_wait: 30s\n"

    assert SCALE == 30
    assert hurry(text) == (
        "for: 30000ms\nexpr: rate(x_total[10000ms] offset 120000ms) > 0.2 and y5m > 300\n  group_wait: 1000ms\n"
    )
