"""The first batch of a run costs the program no more than the others: our set-up is no part of its stages."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_train.instrumentation.dataset_size import MOST_OBJECTS
from otel_train.instrumentation.module import MOST_LOOKED_INTO
from tests.support.alertmanager import alertmanager
from tests.support.receiver import http_receiver
from tests.support.warm import ended
from tests.support.zero_code import (
    LIMIT_S,
    QUIET,
    environment,
    launched,
    run_zero_code,
    summaries_below,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

STAGE_S = 0.02

PROGRAM = f"""
    import gc, json, os, sys, time, urllib.request
    import torch
    from torch.utils.data import DataLoader, Dataset

    calls = dict.fromkeys(("gc.get_objects", "gc.get_referrers", "gc.get_referents"), 0)

    def count(event, args):
        if event in calls:
            calls[event] += len(args) if event == "gc.get_referents" else 1

    class Rows(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, row):
            inside.update(sys.modules)  # the first is made after the first ask has begun
            time.sleep({STAGE_S} / 4)
            return torch.ones(4), row % 2

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep({STAGE_S})
            return x * 1
        @staticmethod
        def backward(ctx, gradient):
            time.sleep({STAGE_S})
            return gradient * 1

    class Model(torch.nn.Linear):
        def forward(self, x):
            return Slow.apply(super().forward(x))

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep({STAGE_S})
            return super().step(closure)

    inside = {{}}
    sys.addaudithook(count)
    how, ballast = sys.argv[1], [[[number]] for number in range(int(sys.argv[2]))]
    model, loader = Model(4, 2), DataLoader(Rows(), batch_size=4)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    session = None
    if how == "given":
        import otel_train
        session = otel_train.instrument(model, {{"loader": loader}})
    known = set()
    end = time.monotonic() + float(sys.argv[3])
    while True:
        for x, y in loader:
            known = known or set(inside)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if time.monotonic() > end:
            break
    late = sorted(set(sys.modules) - known)
    if session is not None:
        session.close()
    print(json.dumps({{"late": late, "calls": calls}}))
"""


def program(folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    return path


def trained(
    how: str, folder: Path, *, ballast: int = 0, for_s: float = 0.0, collector: str = "", **settings: str
) -> dict[str, Any]:
    """What the program found out, observed in this way."""
    words, runs = [str(program(folder)), how, str(ballast), str(for_s)], folder / "runs"
    environ = environment(**({"OTEL_EXPORTER_OTLP_ENDPOINT": collector} if collector else {}))
    if how == "run":
        done = run_zero_code(words, runs, environ=environ, **settings)
    else:
        named = {**QUIET, "run_dir": str(runs), **settings}
        variables = {f"OTEL_TRAIN_{name.upper()}": value for name, value in named.items()}
        done = launched([sys.executable, *words], {**environ, **variables})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained("bare", tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize("how", ["given", "run"])
def test_no_module_is_first_imported_between_the_first_edge_and_the_last(
    how: str, bare: dict[str, Any], tmp_path: Path
) -> None:
    """An import holds the interpreter: on the service thread, too, it lengthens whatever stage is open."""
    with http_receiver() as received:
        ours = trained(
            how, tmp_path, for_s=3.0, collector=received.endpoint, otlp="auto", prometheus="true",
            prometheus_address="127.0.0.1:0", console="true", log_every_steps="5",
            tuning="poll_interval_s=0.05,summary_interval_s=1", export_interval_s="0.1",
        )  # fmt: skip

    assert received.metrics
    assert sorted(set(ours["late"]) - set(bare["late"])) == []


def test_an_agent_in_a_thread_imports_nothing_to_ask_an_alertmanager(
    bare: dict[str, Any], tmp_path: Path
) -> None:
    """The first question comes while the program trains."""
    with alertmanager() as server:
        ours = trained(
            "given", tmp_path, for_s=3.0, agent="thread", run_id="r", alertmanager_url=server.url,
            tuning="poll_interval_s=0.05",
        )  # fmt: skip

    assert server.asked
    assert sorted(set(ours["late"]) - set(bare["late"])) == []


class Heavy(NamedTuple):
    """A program with a million lists: what it found out, and its summary."""

    found: dict[str, Any]
    summary: dict[str, Any]


@pytest.fixture(scope="module", params=["given", "run"])
def heavy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heavy:
    """Trained once for each way of observing it."""
    folder = tmp_path_factory.mktemp("heavy")
    found = trained(request.param, folder, ballast=500_000)
    [summary] = summaries_below(folder / "runs")
    return Heavy(found, summary)


def test_what_we_look_at_does_not_grow_with_the_program(heavy: Heavy) -> None:
    """A program that holds its rows in lists would stand still for seconds in its first step."""
    calls = heavy.found["calls"]

    assert (calls["gc.get_objects"], calls["gc.get_referrers"]) == (0, 0)
    assert calls["gc.get_referents"] <= MOST_LOOKED_INTO + MOST_OBJECTS


def test_the_first_step_takes_what_its_stages_take(heavy: Heavy) -> None:
    """Each stage sleeps 20 ms; a look through everything that lives took half a second of the first step."""
    summary = heavy.summary
    stages = {row["stage"]: row for row in summary["stages"]}

    assert summary["steps"] == {"train": 6}
    assert max(row["max"] for row in summary["step_durations"]) < 4 * STAGE_S + 0.3
    for stage in ("data", "forward", "backward", "optimizer"):
        assert STAGE_S <= stages[stage]["max"] < STAGE_S + 0.2


REACH = """
    import sys
    import torch
    import otel_train
    from torch.utils.data import DataLoader, TensorDataset
    import held

    class Trainer:
        pass

    def hidden(compiled):
        return lambda x: compiled(x)

    def main(where):
        raw = held.raw
        compiled = torch.compile(raw, backend="eager")
        compiled(torch.ones(4, 4))  # there is nothing left to compile when the session begins
        call = compiled
        if where == "attribute":
            trainer = Trainer()
            trainer.parts = {"models": [compiled]}
            call = lambda x: trainer.parts["models"][0](x)
        elif where == "closure":
            call = hidden(compiled)
        elif where == "module":
            held.compiled = compiled
            call = lambda x: held.compiled(x)
        del compiled
        train(raw, call)

    def train(raw, call):
        loader = DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=4)
        optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
        session = otel_train.instrument(raw, {"loader": loader})
        for (x,) in loader:
            optimizer.zero_grad()
            call(x).sum().backward()
            optimizer.step()
        session.close()
        print([row["count"] for row in session.summary()["stages"] if row["stage"] == "forward"])

    main(sys.argv[1])
"""


@pytest.mark.parametrize("where", ["variable", "attribute", "closure", "module"])
def test_what_was_compiled_before_is_found_where_the_program_holds_it(where: str, tmp_path: Path) -> None:
    """The loop calls it instead of the model that was given; without it all forwards are missing."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(REACH), encoding="utf-8")
    held = "import torch; raw = torch.nn.Sequential(torch.nn.Linear(4, 4))"
    (tmp_path / "held.py").write_text(held, encoding="utf-8")
    quiet = {"OTEL_TRAIN_PROMETHEUS": "false", "OTEL_TRAIN_CONSOLE": "false", "OTEL_TRAIN_OTLP": "off"}

    command = [sys.executable, str(script), where]
    done = ended(command, environment(**quiet, OTEL_TRAIN_RUN_DIR=str(tmp_path / "runs")))

    assert (done.returncode, done.stdout) == (0, "[5]\n"), done.stderr
