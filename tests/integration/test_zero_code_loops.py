"""Loops that do not import otel_train are counted like the same loops when instrumented."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.loops.truth import EAGER, LOOPS, QUIET, Net, NoSession, Truth, dataset, loader, sgd
from tests.integration.test_loops import expected, found
from tests.support.zero_code import zero_code

SAME = (
    "plain",
    "early_break_after_the_update",
    "batches_that_are_skipped",
    "an_inner_loop_with_updates",
    "validation_in_mid_group",
    "two_live_iterators_of_one_loader",
)
"""Programs whose models and loaders are what zero-code would find."""


def stripped(values: dict[str, Any], truth: Truth) -> dict[str, Any]:
    """Values without the names that only the program could give."""
    plain = dict(values)
    for name in ("batches", "data", "samples"):
        if name in plain:
            plain[name] = sorted(plain[name].values())
    return plain


@pytest.mark.parametrize("name", SAME)
def test_an_unchanged_loop_is_counted_the_same(name: str, tmp_path: Path) -> None:
    """Who cannot touch the code must not get other values."""
    with zero_code(tmp_path, **QUIET, **EAGER) as sessions:
        truth = LOOPS[name](NoSession())  # type: ignore[arg-type]  # called like one
    [session] = sessions
    summary = session.summary()

    assert stripped(found(summary, truth), truth) == stripped(expected(truth), truth)
    assert summary["telemetry"]["faults"] == {}


def forwards(summary: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {
        (row["model"], row["phase"]): row["count"] for row in summary["stages"] if row["stage"] == "forward"
    }


def learn(model: Any, optimizer: Any, batches: Any, criterion: Any = None) -> None:
    criterion = criterion or torch.nn.CrossEntropyLoss()
    for x, y in batches:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def evaluate(model: Any, loader: Any) -> None:
    """As it is usually written: the parameter's name says nothing."""
    model.eval()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
    model.train()


def test_loaders_are_named_by_the_variable_that_holds_them(tmp_path: Path) -> None:
    """`TensorDataset` and `TensorDataset_2` do not tell which one is slow."""
    model, train_loader, val_loader = Net(), loader(4), loader(2)
    dataloaders = {"few": loader(1), "many": loader(3)}
    with zero_code(tmp_path, **QUIET) as sessions:
        learn(model, sgd(model), train_loader)
        evaluate(model, val_loader)
        for part in ("few", "many"):
            for _ in dataloaders[part]:
                pass
        for _ in DataLoader(dataset(1), batch_size=4):
            pass
    summary = sessions[0].summary()

    assert summary["batches"] == {
        "train_loader": 4, "val_loader": 2, "few": 1, "many": 3, "TensorDataset": 1
    }  # fmt: skip
    assert summary["steps"]["train"] == 4
    assert forwards(summary) == {("Net", "train"): 4, ("Net", "eval"): 2}


def test_a_later_model_is_found_with_its_optimizer_and_an_eval_only_model_with_its_loader(
    tmp_path: Path,
) -> None:
    """Sweeps and teachers come late; the hook that finds models is out by then."""
    batches = loader(100)
    with zero_code(tmp_path, **QUIET) as sessions:
        first = Net()
        learn(first, sgd(first), batches)
        assert torch.nn.Module.__call__.__name__ != "_observed_call"
        second = Net()
        learn(second, sgd(second), batches)
        teacher = torch.nn.Sequential(torch.nn.Linear(4, 2))
        evaluate(teacher, loader(2))
    summary = sessions[0].summary()

    assert forwards(summary) == {("Net", "train"): 100, ("Net_2", "train"): 100, ("Sequential", "eval"): 2}


def test_a_model_is_found_while_another_thread_calls_its_own_much_more_often(tmp_path: Path) -> None:
    """The search of a thread that begins a loader is not used up by the others."""
    first, second = Net(), torch.nn.Sequential(torch.nn.Linear(4, 2))
    with zero_code(tmp_path, **QUIET) as sessions, ThreadPoolExecutor(1) as another:
        another.submit(learn, first, sgd(first), loader(100)).result()
        with torch.no_grad():
            for x, _ in loader(3):  # before the model of this thread is called for the first time
                another.submit(lambda: [first(torch.zeros(1, 4)) for _ in range(80)]).result()
                second(x)

    assert forwards(sessions[0].summary())["Sequential", "eval"] == 3


def test_losses_metrics_and_what_a_constructor_tries_are_no_models(tmp_path: Path) -> None:
    """A criterion is called every step, and a convnet tries its trunk to learn its width."""

    class Tries(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = torch.nn.Linear(4, 8)
            with torch.no_grad():
                width = self.trunk(torch.zeros(1, 4)).shape[1]
            self.head = torch.nn.Linear(width, 2)

        def forward(self, x: Any) -> Any:
            return self.head(self.trunk(x))

    with zero_code(tmp_path, **QUIET) as sessions:
        model = Tries()
        assert not sessions  # nothing trains yet
        learn(model, sgd(model), loader(5), torch.nn.CrossEntropyLoss(torch.ones(2)))

    assert forwards(sessions[0].summary()) == {("Tries", "train"): 5}


def test_a_part_that_was_called_first_gives_way_to_the_whole(tmp_path: Path) -> None:
    """A forward inside a forward would be counted twice."""
    model = Net()
    with zero_code(tmp_path, **QUIET) as sessions:
        model.first(torch.zeros(1, 4))
        learn(model, sgd(model), loader(5))

    assert forwards(sessions[0].summary()) == {("Linear", "train"): 1, ("Net", "train"): 5}


def test_a_model_whose_call_is_the_first_sign_is_found(tmp_path: Path) -> None:
    """A loop without a loader begins with its model."""
    model, batch = Net(), (torch.ones(4, 4), torch.zeros(4, dtype=torch.long))
    optimizer, criterion = sgd(model), torch.nn.CrossEntropyLoss()
    with zero_code(tmp_path, **QUIET) as sessions:
        learn(model, optimizer, [batch] * 3, criterion)
    summary = sessions[0].summary()

    assert forwards(summary) == {("Net", "train"): 3}
    assert summary["steps"] == {"train": 3}


def test_a_loop_of_updates_alone_is_noticed_and_counted(tmp_path: Path) -> None:
    """Gradients may come from anywhere, such as a population of trials."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with zero_code(tmp_path, **QUIET) as sessions:
        for _ in range(5):
            weight.grad = torch.ones(2)
            optimizer.step()

    assert sessions[0].summary()["updates"] == 5
    assert torch.allclose(weight.detach(), torch.full((2,), 0.5))


def test_names_that_the_program_gives_win_over_what_was_found(tmp_path: Path) -> None:
    """A sanity check before `instrument` starts the session early; the line in the code still counts."""
    model, train = Net(), loader(4)
    with zero_code(tmp_path, **QUIET) as sessions:
        for x, _ in train:
            model(x)
        import otel_train

        assert otel_train.instrument({"student": model}, {"code": train}) is sessions[0]
        learn(model, sgd(model), train)
    summary = sessions[0].summary()

    assert summary["batches"] == {"train": 4, "code": 4}
    assert forwards(summary)["student", "train"] == 4


def test_a_wrapped_model_is_one_model(tmp_path: Path) -> None:
    """DistributedDataParallel, torch.compile and their like call the model inside them."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            return self.module(x)

    inner = Net()
    compiled = torch.compile(Net(), backend="eager")
    with zero_code(tmp_path, **QUIET) as sessions:
        learn(Wrapper(inner), sgd(inner), loader(4))
        learn(compiled, sgd(compiled), loader(4))

    assert forwards(sessions[0].summary()) == {("Wrapper", "train"): 4, ("Net", "train"): 4}


def test_looking_for_models_breaks_no_graph(tmp_path: Path) -> None:
    """One graph, no recompilation: as without us, whether the hook is in or out."""
    from torch._dynamo.testing import CompileCounter

    def graphs(folder: Path | None) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        model = torch.compile(Net(), backend=counter, fullgraph=True)
        if folder is None:
            learn(model, sgd(model), loader(100))
        else:
            with zero_code(folder, **QUIET):
                learn(model, sgd(model), loader(100))
            learn(model, sgd(model), loader(3))
        return int(counter.frame_count)

    assert graphs(tmp_path) == graphs(None) == 1


def test_nothing_stays_when_the_session_closes(tmp_path: Path) -> None:
    """The program goes on without hooks."""
    from torch.utils.data import dataloader

    def hooks() -> list[Any]:
        return [
            torch.nn.Module.__call__, torch.optim.Optimizer.__init__, torch.autograd._engine_run_backward,
            dataloader._BaseDataLoaderIter.__init__, dataloader._SingleProcessDataLoaderIter.__init__,
        ]  # fmt: skip

    before = hooks()
    model = Net()
    with zero_code(tmp_path, **QUIET):
        learn(model, sgd(model), loader(2))
        assert hooks() != before

    assert hooks() == before
    assert "_compiled_call_impl" not in model.__dict__


def test_a_loader_inside_a_loader_has_the_name_of_the_one_that_the_program_knows(tmp_path: Path) -> None:
    """Libraries put a DataLoader of their own in place of the user's, under a name that means nothing to the user."""

    class Prepared:
        def __init__(self, base: DataLoader[Any]) -> None:
            self.base_dataloader = base

        def __iter__(self) -> Any:
            yield from self.base_dataloader

    model, train_loader = Net(), Prepared(loader(3))
    with zero_code(tmp_path, **QUIET) as sessions:
        learn(model, sgd(model), train_loader)

    assert sessions[0].summary()["batches"] == {"train_loader": 3}
