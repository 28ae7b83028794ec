"""TLS and a token between trainers and a real Collector, with the files that ship."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from otel_train.cli.main import main
from otel_train.stack import tls
from otel_train.stack.local import LocalStack
from tests.support.stack import ROOT, configured, free_ports, get, value, wait_for
from tests.support.zero_code import ended_well

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

STEPS = 80
EXIT_WITHIN_S = 10.0
"""The session may wait 1.5 s; the rest is Python and torch ending on a busy machine."""

SAYS = {
    "token": "refuses the token",
    "certificate": "has a certificate that is not trusted",
}
REMEDY = {"token": "OTEL_EXPORTER_OTLP_HEADERS", "certificate": "OTEL_EXPORTER_OTLP_CERTIFICATE"}


@contextmanager
def secure_stack(state: Path) -> Iterator[LocalStack]:
    made = LocalStack(state, free_ports(), os.environ, secure=True)
    with configured(made, "prometheus", "jaeger", "collector"):
        yield made


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with secure_stack(tmp_path_factory.mktemp("secure")) as made:
        yield made


@pytest.fixture(scope="module")
def bare_loss(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What training comes to without us."""
    return train(tmp_path_factory.mktemp("bare"), {}, "--bare")[0]


def trainer_variables(made: LocalStack, protocol: str) -> dict[str, str]:
    """What the file that `stack up --secure` names says, for either protocol."""
    text = (tls.folder(made.state) / tls.TRAINER).read_text(encoding="utf-8")
    environ = dict(line.split("=", 1) for line in text.splitlines())
    if protocol == "grpc":
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"https://127.0.0.1:{made.ports.otlp_grpc}"
    return {**environ, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}


def train(folder: Path, environ: dict[str, str], *words: str) -> tuple[str, float, list[str]]:
    """The last loss, how long the end took, and what was said on stderr."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    ours = {
        "OTEL_TRAIN_RUN_DIR": str(folder),
        "OTEL_TRAIN_EXPORT_INTERVAL_S": "0.5",
        "OTEL_TRAIN_PROMETHEUS": "false",
        "OTEL_TRAIN_CONSOLE": "false",
        "OMP_NUM_THREADS": "1",
    }
    program = ROOT / "tests" / "stack" / "trainers" / "brief.py"
    done = ended_well([sys.executable, program, str(STEPS), *words], {**inherited, **ours, **environ}, ROOT)
    ended_s = time.time()
    loss, at_s = done.stdout.split()
    return loss, ended_s - float(at_s), done.stderr.splitlines()


def traces(made: LocalStack, run: str) -> int:
    address = f"http://127.0.0.1:{made.ports.jaeger}/api/traces"
    tags = json.dumps({"train.run.id": run})
    return len(get(address, service="otel-train", tags=tags, limit="10", lookback="1h")["data"])


def steps(made: LocalStack, run: str) -> float:
    return value(made, f'train_steps_total{{train_run_id="{run}",train_phase="train"}}') or 0.0


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_right_certificate_and_token_arrive(secure: LocalStack, tmp_path: Path, protocol: str) -> None:
    """With the variables that the stack wrote, and nothing else."""
    run = f"right-{protocol[:4]}"
    _, _, said = train(tmp_path, {**trainer_variables(secure, protocol), "OTEL_TRAIN_RUN_ID": run})

    assert [line for line in said if "OTLP" in line] == []
    wait_for(lambda: steps(secure, run) == STEPS, what="every step in Prometheus")
    wait_for(lambda: not (tmp_path / run / "rank0" / "spool").exists(), what="an empty spool")


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("wrong", ["token", "certificate"])
def test_the_wrong_one_is_one_clear_line_and_costs_nothing(
    secure: LocalStack,
    bare_loss: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    protocol: str,
) -> None:
    """A rotated secret must not cost a run its metrics, and least of all the run."""
    run = f"wrong-{wrong}-{protocol[:4]}"
    tls.make(tmp_path, endpoint_port=1)  # another authority
    right = {**trainer_variables(secure, protocol), "OTEL_TRAIN_RUN_ID": run}
    bad = {
        "token": {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20stolen"},
        "certificate": {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tls.folder(tmp_path) / tls.AUTHORITY)},
    }[wrong]

    loss, exit_s, said = train(tmp_path, {**right, **bad})

    assert loss == bare_loss
    assert exit_s < EXIT_WITHIN_S
    [line] = said
    assert SAYS[wrong] in line
    assert REMEDY[wrong] in line
    assert str(tmp_path / run / "rank0" / "spool") in line
    assert steps(secure, run) == 0

    for name, text in {**right, **bad}.items():
        monkeypatch.setenv(name, text)
    assert main(["replay", str(tmp_path / run)]) == 1
    assert SAYS[wrong] in capsys.readouterr().err
    for name, text in right.items():
        monkeypatch.setenv(name, text)
    assert main(["replay", str(tmp_path / run)]) == 0
    wait_for(lambda: steps(secure, run) == STEPS, what="every step in Prometheus, after the replay")
    wait_for(lambda: traces(secure, run), what="its traces")


def test_what_is_not_encrypted_is_refused(secure: LocalStack, tmp_path: Path) -> None:
    """A token must not travel in the clear because a letter was forgotten."""
    plain = trainer_variables(secure, "http/protobuf")
    plain["OTEL_EXPORTER_OTLP_ENDPOINT"] = plain["OTEL_EXPORTER_OTLP_ENDPOINT"].replace("https", "http")
    _, _, said = train(tmp_path, {**plain, "OTEL_TRAIN_RUN_ID": "plain"})

    [line] = said
    assert "https://" in line


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_doctor_follows_a_metric_and_a_span_all_the_way(
    secure: LocalStack,
    protocol: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Trainer, TLS, token, Collector, Prometheus, Jaeger: each real."""
    for name, text in trainer_variables(secure, protocol).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("OTEL_TRAIN_RUN_DIR", str(tmp_path))
    main(["doctor", "--state", str(secure.state), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    way = [finding for finding in findings if finding["area"] in {"endpoint", "end to end"}]

    assert [finding for finding in way if finding["state"] in {"warning", "problem"}] == []
    assert sum("found in" in finding["what"] for finding in way) == 2

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20stolen")
    assert main(["doctor", "--state", str(secure.state)]) == 2
    assert "refuses the token" in capsys.readouterr().out
