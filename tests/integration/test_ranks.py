"""Two ranks of one run: ids that differ, one run, one trace per step."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import two_ranks
from tests.support.receiver import Received, http_receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 8

SCRIPT = """
import random, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import otel_train

random.seed(0)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
rows = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
train = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = otel_train.instrument(
    model, {"train": train}, run_dir=sys.argv[1], prometheus=False, console=False,
    tuning={"poll_interval_s": 0.05, "trace_every_steps": 1, "trace_warmup_steps": 5, "trace_burst": 100},
)
for x, y in train:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print(random.random(), float(torch.rand(1)))
session.close()
dist.destroy_process_group()
"""


def attributes(items: Any) -> dict[str, Any]:
    """Attributes as a dict of Python values."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in items}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Received, Path, list[str]]:
    """What two ranks sent, where they wrote, and what they printed."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with http_receiver() as received:
        printed = two_ranks(
            str(script),
            str(folder / "runs"),
            timeout_s=100,
            OTEL_EXPORTER_OTLP_ENDPOINT=received.endpoint,
        )
    return received, folder / "runs", printed


def spans_of(received: Received) -> list[tuple[int, Any]]:
    """(rank, span) of everything that was sent."""
    return [
        (attributes(group.resource.attributes)["train.rank"], span)
        for request in received.traces
        for group in request.resource_spans
        for part in group.scope_spans
        for span in part.spans
    ]


def test_equal_seeds_give_different_span_ids(ranks: tuple[Received, Path, list[str]]) -> None:
    """Ids from the global generator would be the same on every rank, and overwrite each other."""
    received, _, printed = ranks
    sent = [(span.trace_id, span.span_id) for _, span in spans_of(received)]

    assert {rank for rank, _ in spans_of(received)} == {0, 1}
    assert len({span_id for _, span_id in sent}) == len(sent)
    assert printed[0] == printed[1]


def test_the_same_step_is_one_trace(ranks: tuple[Received, Path, list[str]]) -> None:
    """A slow step is understood by seeing all its ranks side by side."""
    traces: dict[int, dict[int, bytes]] = defaultdict(dict)
    for rank, span in spans_of(ranks[0]):
        if span.name == "train.rank_step":
            traces[attributes(span.attributes)["train.step.index"]][rank] = span.trace_id

    shared = [step for step in traces.values() if len(step) == 2]
    assert len(shared) >= 5
    for step in shared:
        assert step[0] == step[1]
    assert len({step[0] for step in shared}) == len(shared)


def test_a_parent_named_by_a_span_was_sent(ranks: tuple[Received, Path, list[str]]) -> None:
    """A child without its parent hangs in the air in every viewer."""
    sent = spans_of(ranks[0])
    known = {(span.trace_id, span.span_id) for _, span in sent}

    orphans = [
        span.name
        for _, span in sent
        if span.parent_span_id and (span.trace_id, span.parent_span_id) not in known
    ]
    assert orphans == []


def test_two_ranks_are_one_run(ranks: tuple[Received, Path, list[str]]) -> None:
    """One run id, two senders, a folder and a summary each."""
    received, folder, _ = ranks
    resources = [
        attributes(group.resource.attributes) for r in received.metrics for group in r.resource_metrics
    ]
    assert len({resource["train.run.id"] for resource in resources}) == 1
    assert len({resource["service.instance.id"] for resource in resources}) == 2

    summaries = [json.loads(path.read_text()) for path in sorted(folder.glob("*/rank*/summary.json"))]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [resources[0]["train.run.id"]]
    assert [summary["rank"] for summary in summaries] == [0, 1]
    assert {summary["run_id"] for summary in summaries} == {resources[0]["train.run.id"]}
    assert {summary["world_size"] for summary in summaries} == {2}
    for summary in summaries:
        assert summary["steps"] == {"train": STEPS}
        assert summary["batches"] == {"train": STEPS}
        assert summary["state"] == "finished"
