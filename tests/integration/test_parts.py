"""A part of an instrumented model is seen where the program calls it by itself, and costs nothing else."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from otel_train.instrumentation import registry
from tests.integration.loops.truth import Truth, Watch, Wrapper, loader, sgd

SLOT = "_compiled_call_impl"
ROWS = torch.ones(2, 4)


class Model(nn.Module):
    """An encoder and a head, with the loss beside them as many programs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def sample(self, times: int) -> Iterator[torch.Tensor]:
        for _ in range(times):
            yield self(ROWS)


def forwards(session: Any) -> dict[str, int]:
    """Occurrences of forward by model, with those that failed."""
    session.close()
    counts: dict[str, int] = {}
    for row in session.summary()["stages"]:
        if row["stage"] == "forward":
            counts[row["model"]] = counts.get(row["model"], 0) + row["count"]
    return counts


def wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if SLOT in module.__dict__]


# --- what is counted -----------------------------------------------------------------------------


def test_a_part_counts_where_no_forward_is_open(watch: Watch) -> None:
    """Feature extraction calls the encoder and never the model: it used to be no forward at all."""
    model = Model()
    session = watch({"net": model})
    model(ROWS)
    model.head(model.encoder(ROWS))
    list(model.sample(2))
    model.criterion(model.encoder(ROWS)[:, :2], torch.zeros(2, dtype=torch.long))

    assert forwards(session) == {"net": 1 + 2 + 2 + 1}


def test_a_part_counts_again_after_a_forward_that_raised(watch: Watch) -> None:
    """What is left marked as open by an exception would hide every part from then on."""
    model = Model()
    session = watch({"net": model})
    for wrong in (model, model.encoder):
        with pytest.raises(RuntimeError):
            wrong(torch.ones(2, 3))
    model.encoder(ROWS)

    assert forwards(session) == {"net": 3}
    assert sum(row["failed"] or 0 for row in session.summary()["stages"] if row["stage"] == "forward") == 2


def test_a_forward_that_is_a_generator_does_not_hide_the_parts_after_it(watch: Watch) -> None:
    """Its call returns at once: what it runs later is outside of it."""

    class Streaming(Model):
        def forward(self, x: torch.Tensor) -> Any:
            yield self.encoder(x)
            yield self.head(self.encoder(x))

    model = Streaming()
    session = watch({"net": model})
    assert len(list(model(ROWS))) == 2

    assert forwards(session) == {"net": 1 + 3}


def test_a_forward_in_another_thread_hides_nothing(watch: Watch) -> None:
    """An actor evaluates the encoder while the learner is in a forward of the same model."""
    inside, over = threading.Event(), threading.Event()

    class Slow(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert over.wait(10)
            return super().forward(x)

    model = Slow()
    session = watch({"net": model})
    learner = threading.Thread(target=model, args=(ROWS,))
    learner.start()
    assert inside.wait(10)
    model.encoder(ROWS)
    over.set()
    learner.join()
    model.head(ROWS)

    assert forwards(session) == {"net": 3}


def test_a_model_that_calls_itself_is_one_forward(watch: Watch) -> None:
    """The inner call ends before the outer one: what follows it is still inside."""

    class Twice(Model):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            x = self(x, depth - 1) if depth else x
            return self.encoder(x)

    model = Twice()
    session = watch({"net": model})
    model(ROWS)

    assert forwards(session) == {"net": 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_part_that_is_computed_again_in_backward_stays_in_it(reentrant: bool, watch: Watch) -> None:
    """Activation checkpointing of layers, where a method of the model calls them."""
    model = Model()
    session = watch({"net": model})
    x = ROWS.clone().requires_grad_()
    model.head(checkpoint(model.encoder, x, use_reentrant=reentrant)).sum().backward()

    assert forwards(session) == {"net": 2}


def test_the_first_model_that_has_a_part_keeps_it(watch: Watch) -> None:
    """Actor and critic with one encoder: its forward is of one of them, and inside the other's it is none."""
    actor, critic = Model(), Model()
    critic.encoder = actor.encoder
    session = watch({"actor": actor, "critic": critic})
    actor(ROWS)
    critic(ROWS)
    actor.encoder(ROWS)
    critic.head(ROWS)

    assert forwards(session) == {"actor": 2, "critic": 2}


@pytest.mark.parametrize("order", [("net", "head"), ("head", "net")])
def test_a_part_that_is_given_by_name_keeps_its_name(order: tuple[str, str], watch: Watch) -> None:
    """Who names the head wants to see the head."""
    model = Model()
    given = {"net": model, "head": model.head}
    session = watch({name: given[name] for name in order})
    model(ROWS)
    model.head(model.encoder(ROWS))

    assert forwards(session) == {"net": 2, "head": 1}
    assert wrapped(model) == []


def test_a_part_that_outlives_its_model_goes_to_the_next_one(watch: Watch) -> None:
    """A sweep puts one head after the other on the same encoder."""
    first, second = Model(), Model()
    second.encoder = encoder = first.encoder
    session = watch({"first": first})
    del first
    watch.models.clear()
    watch({"second": second})
    encoder(ROWS)

    assert forwards(session) == {"second": 1}
    assert wrapped(second) == []


def test_a_head_that_has_a_name_keeps_it_when_it_compiles_itself(watch: Watch) -> None:
    """``compile()`` overwrites the place where its calls are seen: it must not become a part of the whole."""
    model = Model()
    session = watch({"net": model, "head": model.head})
    model.head.compile(backend="eager")
    compiled = model.head.__dict__[SLOT]
    model.encoder.compile(backend="eager")
    model.head(model.encoder(ROWS))

    assert forwards(session) == {"net": 1, "head": 1}
    assert wrapped(model) == ["encoder", "head"]
    assert model.head.__dict__[SLOT] is not compiled


def test_the_model_inside_a_wrapper_is_seen_and_so_are_its_parts(watch: Watch) -> None:
    """Trainers take the wrapper off to evaluate."""
    wrapper = Wrapper(Model())
    session = watch({"net": wrapper})
    wrapper(ROWS)
    wrapper.module(ROWS)
    wrapper.module.encoder(ROWS)

    assert forwards(session) == {"net": 3}


def test_a_head_that_is_replaced_is_seen_from_the_next_pass_on(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning puts a new head on, after the session began as before."""
    monkeypatch.setattr(registry, "PARTS_EVERY_S", 0.0)
    model, batches = Model(), loader(2)
    session = watch({"net": model}, {"train": batches})
    old, model.head = model.head, nn.Linear(4, 3)
    for x, _ in batches:
        model.head(x)
    old(ROWS)

    assert wrapped(model) == ["", "encoder", "head"]
    assert forwards(session) == {"net": 2}


# --- what is left as it is -----------------------------------------------------------------------


def test_close_takes_every_wrapper_out(watch: Watch) -> None:
    """The loop runs on without wrappers; what a part had in the slot is there again."""
    model = Model()
    model.head.compile(backend="eager")
    compiled = model.head.__dict__[SLOT]
    session = watch(model)
    assert wrapped(model) == ["", "encoder", "head"]
    assert model.head.__dict__[SLOT] is not compiled
    session.close()

    assert wrapped(model) == ["head"]
    assert model.head.__dict__[SLOT] is compiled


class Same(nn.Module):
    """A parametrization that changes nothing; its module's class copies ``__dict__`` whole."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def test_a_deep_copy_of_a_parametrized_module_runs_its_own_weights(watch: Watch) -> None:
    """Averaged copies of models with weight norm: a wrapper bound to the original would run the original."""
    model = Model()
    parametrize.register_parametrization(model.head, "weight", Same())
    session = watch({"net": model})
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(ROWS).any()
        assert not other.head(ROWS).any()
        model.encoder(ROWS)

    assert forwards(session) == {"net": 1}


class Dicts(Model):
    """Its state is its whole ``__dict__``, as that of ``DistributedDataParallel`` is."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_class_with_a_state_of_its_own_is_clean(way: Any, watch: Watch) -> None:
    """A function in the slot cannot be pickled, and would be the original's."""
    model = Dicts()
    session = watch({"net": model})
    other = way(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(ROWS).any()
        assert model(ROWS).any()

    assert forwards(session) == {"net": 1}


def shallow(module: nn.Module) -> nn.Module:
    """Clones a module as learn2learn does for meta-learning: ``__dict__`` is copied, its tables are new."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {key: one * 0 for key, one in module._parameters.items()}
    clone._modules = {key: shallow(one) for key, one in module._modules.items()}
    return clone


def assigned(module: nn.Module) -> nn.Module:
    """Clones a module as higher does: a new one gets every attribute."""
    clone = type(module)()
    for name, value in module.__dict__.items():
        if name not in ("_parameters", "_modules"):
            setattr(clone, name, value)
    for parameter in clone.parameters():
        parameter.data.zero_()
    return clone


def own_weights(clone: nn.Module) -> bool:
    """Returns whether the clone, called twice, and its parts run their own weights, which are zeros."""
    return not any(call(ROWS).any() for call in (clone, clone, clone.encoder, clone.head))


@pytest.mark.parametrize("copied", [shallow, assigned])
def test_a_copy_of_the_dict_of_a_model_runs_its_own_weights(copied: Any, watch: Watch) -> None:
    """Meta-learning trains such clones: a wrapper that runs the original's weights trains nothing, without an error."""
    model = Model()
    session = watch({"net": model})
    first, second, third = copied(model), copied(model), copied(model)

    assert model(ROWS).any()
    assert own_weights(first)
    assert model(ROWS).any()
    forwards_of_the_model = 2
    assert forwards(session) == {"net": forwards_of_the_model}
    assert own_weights(second)
    del model
    assert own_weights(third)


def test_a_copy_of_the_dict_of_a_model_outlives_it(watch: Watch) -> None:
    """The clone that was adapted is kept, the original is not."""
    model = Model()
    watch({"net": model})
    clone = shallow(model)
    del model
    gc.collect()

    assert own_weights(clone)


def test_a_copy_of_the_dict_of_a_model_can_be_given_too(watch: Watch) -> None:
    """It is a model of its own, and the original stays one."""
    model = Model()
    session = watch({"net": model})
    clone = shallow(model)
    session.add({"clone": clone})

    assert own_weights(clone)
    assert model(ROWS).any()
    assert forwards(session) == {"net": 1, "clone": 4}


def test_a_copy_of_the_dict_of_a_deep_copy_runs_its_own_weights(watch: Watch) -> None:
    """A deep copy of a parametrized module has a wrapper that is bound to it."""
    model = Model()
    parametrize.register_parametrization(model.head, "weight", Same())
    watch({"net": model})

    assert not shallow(copy.deepcopy(model).head)(ROWS).any()


class Process(nn.Module):
    """Called as the models of gpytorch are: its ``__call__`` calls ``forward``, which computes with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(4))

    def __call__(self, x: torch.Tensor) -> Any:
        return self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.mean


class Caller(nn.Module):
    """Calls another model in its forward, which is no part of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.layer, self.others = nn.Linear(4, 2), (other,)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) + self.others[0](x)


@pytest.mark.parametrize("called_by", ["inside the forward of another model", "a __call__ of its class"])
def test_what_is_said_of_an_unseen_forward_names_what_calls_the_model(watch: Watch, called_by: str) -> None:
    """The program does call its model: without this reason the reader looks for a mistake of his own."""
    model = nn.Linear(4, 2) if "another" in called_by else Process()
    called = Caller(model) if "another" in called_by else model
    session = watch({"called": called, "model": model} if called is not model else {"model": model})
    for _ in range(9):
        called(ROWS).sum().backward()
    session.close()

    [reason] = [gap["reason"] for gap in session.summary()["instrumentation_gaps"] if gap["name"] == "model"]
    assert called_by in reason


def test_replicas_have_no_wrapper(watch: Watch) -> None:
    """``DataParallel`` copies ``__dict__`` of every module into its replicas."""
    model = Model()
    watch(model)

    assert [SLOT in module._replicate_for_data_parallel().__dict__ for module in model.modules()] == [
        False
    ] * len(list(model.modules()))


def test_an_instrumented_model_can_be_scripted_traced_and_exported(watch: Watch) -> None:
    """Models are exported in the program that trains them."""
    model = Model().eval()
    watch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says what goes out of use
        made = [
            torch.jit.script(model), torch.jit.trace(model, ROWS), torch.fx.symbolic_trace(model),
            torch.export.export(model, (ROWS,)).module(),
            torch.export.export(model, (ROWS,), strict=True).module(),
        ]  # fmt: skip
    for other in made:
        assert torch.equal(other(ROWS), model(ROWS))
        own = set(other.modules()) - set(model.modules())  # fx shares the leaves
        assert not any(SLOT in module.__dict__ for module in own)


def test_a_transformer_still_takes_its_fast_path(watch: Watch) -> None:
    """A forward hook on one inner layer turns it off: inference becomes several times slower."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.rand(2, 5, 8)

    def fast_layers() -> int:
        with torch.profiler.profile() as profile, torch.no_grad():
            model(x)
        return sum(
            event.count for event in profile.key_averages() if "_transformer_encoder_layer_fwd" in event.key
        )

    bare = fast_layers()
    watch(model)
    assert len(wrapped(model)) == 1 + 3

    assert fast_layers() == bare > 0


def test_models_of_a_sweep_are_freed_at_once(watch: Watch) -> None:
    """Device memory is wanted for the next model now, not when the garbage collector runs."""
    model, batches, truth = Model(), loader(2), Truth()
    watch(model, {"train": batches})
    optimizer = sgd(model)
    for batch in batches:
        truth.learn(model, optimizer, batch)
    gone = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        watch.models.clear()
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()


# --- the compiler --------------------------------------------------------------------------------


class Breaking(nn.Module):
    """A part in which the graph breaks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return x * 2


def compiled_root(model: Model) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Model) -> Any:
    model.compile(backend="eager")
    return model


def compiled_part(model: Model) -> Any:
    encoder = torch.compile(model.encoder, backend="eager")
    return lambda x: (encoder(x), model.head(x))


def compiled_part_in_place(model: Model) -> Any:
    model.encoder.compile(backend="eager")
    return lambda x: (model.encoder(x), model(x))


def compiled_function(model: Model) -> Any:
    return torch.compile(lambda x: model.head(model.encoder(x) * 2), backend="eager")


WAYS = [compiled_root, compiled_in_place, compiled_part, compiled_part_in_place, compiled_function]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "breaks", "hooked"])
@pytest.mark.parametrize("way", WAYS)
def test_instrumented_parts_add_no_graph_break_and_no_recompile(
    way: Callable[[Model], Any], kind: str, watch: Watch
) -> None:
    """Whatever of a model is compiled, before or after the session begins."""
    from torch._dynamo.utils import counters

    def run(when: str) -> tuple[int, int, int]:
        torch._dynamo.reset()
        counters.clear()
        model = Model()
        if kind == "breaks":
            model.encoder = Breaking()
        if kind == "hooked":
            model.encoder.register_forward_hook(lambda *_: None)
        session = watch(model) if when == "before" else None
        called = way(model)
        session = watch(model) if when == "after" else session
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                called(ROWS)
                model.encoder(ROWS)
        if session is not None:
            session.close()
        frames, graphs = counters["frames"]["total"], counters["stats"]["unique_graphs"]
        return frames, graphs, sum(counters["graph_break"].values())

    bare = run("never")
    assert [run("before"), run("after")] == [bare, bare]
