"""Registry of the loaders and models that are recorded, and their names."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.dataloader import DataLoaderPatch, iterators_of
from otel_train.instrumentation.iterables import InstrumentedIterable, instrumented
from otel_train.instrumentation.loader_probe import LoaderProbe, weak
from otel_train.instrumentation.module import (
    ModulePatch,
    ModuleProbe,
    codes_of_wrappers,
    compiled_before,
    is_or_wraps,
    no_open_forward,
)
from otel_train.instrumentation.naming import CallSite, Loader, attribute, call_site_of, free_name, is_passed
from otel_train.instrumentation.optimizer import BackwardProbe, OptimizerProbe, ScaledUpdates
from otel_train.safety import Guard, free_in_forks, replace

if TYPE_CHECKING:
    from otel_train.instrumentation.root_modules import FoundModels, RootFinder
    from otel_train.recording.recorder import Recorder


OTHER = "_OTHER"

MOST_FOUND = 64
"""Names for loaders without a given name; further ones share ``OTHER``."""

MOST_CHARS = 64
"""Longest derived loader name."""

PARTS_EVERY_S = 1.0
"""Least seconds between two searches for new submodules, at the start of a pass."""

_NOT_IN_NAMES = r"[^\w.-]+"


class ProbeRegistry:
    """Registry of every recorded loader and model.

    Args:
        compiled: called after ``torch.compile`` or ``Module.compile``, and when a pass begins.
        passes: called when a pass begins, at most every ``PARTS_EVERY_S``.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        compiled: Callable[[], None],
        passes: Callable[[], None],
    ) -> None:
        self._compiled = compiled
        self._passes = passes
        self._next_search_s = 0.0
        self._guard = Guard("instrumentation of loaders", limit=sys.maxsize)
        self._parts_guard = Guard("finding parts of models")
        self.loaders: dict[str, LoaderProbe] = {}
        self.models: list[ModuleProbe] = []
        self._iterables: dict[str, Callable[[], Any]] = {}
        self._instrumented: set[str] = set()
        self.patch: DataLoaderPatch | None = None
        self._module_patch: ModulePatch | None = None
        self._recorder = recorder
        self._by_loader: dict[int, LoaderProbe] = {}
        self._cleanup_size = 0
        self._found: set[str] = set()
        self._timed_kinds: dict[type, Callable[[Any], Iterator[Any]]] = {}
        self._undo: list[Callable[[], None]] = []
        self._places: dict[Hashable, list[LoaderProbe]] = {}
        self._naming = Guard("names of loaders")
        self._roots: FoundModels | None = None
        self._open_in = no_open_forward()
        self._lock = free_in_forks(threading.RLock())

    def watch_torch(self) -> None:
        """Instruments every DataLoader that is iterated, and compilation of recorded models."""
        self.patch = DataLoaderPatch(self._probe_for, self._stand_in)
        self._module_patch = ModulePatch(self._compiled, self.follow)

    def add_loader(self, entry: Loader) -> None:
        """Records a loader; the object to iterate is in ``iterables``."""
        made, held = entry.loader, True
        with self._guard:
            made = self._watch(entry)
            held = isinstance(made, InstrumentedIterable)
        self._iterables[entry.name] = (lambda: made) if held else weakref.ref(made)

    def watch(self, entry: Loader) -> Any:  # Any: the user's iterable, or its wrapper
        """Records a loader; returns the object to iterate, which only the program keeps alive."""
        made = entry.loader
        with self._guard:
            made = self._watch(entry)
        known = self._iterables.get(entry.name)
        if known is None or known() is not made:
            self._iterables[entry.name] = weak(made)
            self._instrumented.add(entry.name)
        return made

    @property
    def iterables(self) -> dict[str, Any]:
        """Objects to iterate, by name, while they live: a DataLoader itself, anything else wrapped."""
        found = {name: get() for name, get in self._iterables.items()}
        return {name: iterable for name, iterable in found.items() if iterable is not None}

    def _watch(self, entry: Loader) -> Any:  # Any: the user's loader, or its wrapper
        if isinstance(entry.loader, InstrumentedIterable):
            return entry.loader
        iterated = _iterated_by_torch(entry.loader)
        known = self._known(iterated)
        if known is None or (known.name in self._found and known.name != entry.name):  # a given name wins
            known = self._add_probe(entry._replace(loader=iterated))
        if self.patch is not None and iterated is not entry.loader:
            return entry.loader
        if self.patch is None or not _is_data_loader(entry.loader):
            make = iter if known.inner() is not None else self._iter_of(type(entry.loader))
            return instrumented(entry.loader, known, make)
        for loader in (entry.loader, known.inner()):
            for running in iterators_of(loader):
                self.patch.adopt(running, loader)
        return entry.loader

    def _iter_of(self, kind: Any) -> Callable[[Any], Iterator[Any]]:  # Any: a class
        """Times given loaders of a class also if the loop iterates them directly; returns the function that makes untimed iterators.

        A class whose ``__iter__`` is not a Python function is left alone.
        """
        original = getattr(kind, "__iter__", None)
        if kind in self._timed_kinds or not isinstance(original, FunctionType):
            return self._timed_kinds.get(kind, iter)

        @functools.wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807  # in its place
            inherited = type(loader).__iter__ is not __iter__  # called through ``super()`` in a subclass
            probe = None if inherited else self._known(loader)
            return original(loader) if probe is None else iter(InstrumentedIterable(loader, probe, original))

        self._timed_kinds[kind] = original
        with self._guard:
            self._undo.append(replace(kind, "__iter__", lambda _: __iter__))
        return original

    def add_model(self, name: str, model: Any) -> None:  # Any: a torch.nn.Module
        """Records a given model once, and drops models that were found."""
        if self._roots is not None:
            self._roots.give_way()
        self.record_model(name, model)

    def follow_compiled(self) -> None:
        """Records compiled versions of models that were created before the models were given."""
        for compiled in compiled_before():
            self.follow(compiled, compiled)

    def record_model(self, name: str, model: Any) -> ModuleProbe | None:  # Any: as above
        """Records a model; None if it is recorded already."""
        if self._is_recorded(model):
            return None
        with self._lock:
            self._drop_deleted_models()
            taken = {probe.name: probe for probe in self.models}
            return self._add_model(free_name(name, taken), model)

    def _add_model(self, name: str, model: Any) -> ModuleProbe:  # Any: as above
        probe = ModuleProbe(model, name, self._recorder, self._open_in)
        self.models.append(probe)
        self._recorder.changed()
        return probe

    def _is_recorded(self, model: Any) -> bool:  # Any: as above
        return any(probe.model() is model for probe in self.models)

    def drop_models(self, probes: Sequence[ModuleProbe]) -> None:
        """Stops recording these."""
        for probe in probes:
            probe.remove()
        self.models = [probe for probe in self.models if probe not in probes]

    def _drop_deleted_models(self) -> None:
        self.drop_models([probe for probe in self.models if probe.model() is None])

    def attach_again(self) -> None:
        """Reinstalls hooks that ``Module.compile()`` has overwritten, and instruments new submodules."""
        with self._lock:
            for probe in self.models:  # before the parts: a model in another one keeps its own name
                probe.attach()
            for probe in self.models:
                probe.attach_parts()

    def _pass_starts(self) -> None:
        """Instruments submodules that were added or replaced since the last pass."""
        now_s = time.monotonic()
        if now_s < self._next_search_s or self._parts_guard.closed:
            return
        self._next_search_s = now_s + PARTS_EVERY_S
        with self._parts_guard:
            self._compiled()
            self._passes()

    def follow(self, model: Any, compiled: Any) -> None:  # Any: torch modules
        """Records ``compiled``, which the loop may call instead of the recorded ``model``, under the same name.

        ``model`` may be a wrapper of a recorded one: compiled, it no longer calls the wrapped module.
        """
        if self._is_recorded(compiled):
            return
        with self._lock:
            self._drop_deleted_models()
            for probe in self.models:
                recorded = probe.model()
                if recorded is not None and is_or_wraps(model, recorded):
                    self._add_model(probe.name, compiled)
                    return

    def find_models(self, finder: RootFinder | None) -> None:
        """Records every model that ``finder`` finds; None: a new finder, unless there is one or models were given."""
        from otel_train.instrumentation.root_modules import FoundModels, RootFinder

        if finder is not None or (self._roots is None and not self.models):
            self._roots = FoundModels(finder or RootFinder(), self)

    def remove(self) -> None:
        """Removes all hooks."""
        if self._roots is not None:
            self._roots.remove()
        if self.patch is not None:
            self.patch.remove()
        if self._module_patch is not None:
            self._module_patch.remove()
        for undo in self._undo:
            with self._guard:  # a metaclass of the program may raise
                undo()
        for probe in self.models:
            probe.remove()

    def _known(self, loader: Any) -> LoaderProbe | None:  # Any: the user's own
        probe = self._by_loader.get(id(loader))
        mine = probe is not None and any(get() is loader for get in (probe.loader, probe.inner))
        return probe if mine else None

    def _add_probe(self, entry: Loader) -> LoaderProbe:
        probe = LoaderProbe(entry, self._recorder)
        probe.pass_starts = self._pass_starts
        before = self.loaders.get(entry.name)
        if before is not None:  # folds, sweeps: the series goes on
            probe.inherit(before)
        with self._lock:
            self.loaders[entry.name] = probe
            self._forget_dead()
            self._by_loader[id(entry.loader)] = probe
            if self.patch is not None:
                probe.inner = _inner(entry.loader)
            inner = probe.inner()
            if inner is not None:
                self._by_loader[id(inner)] = probe
        self._recorder.changed()
        return probe

    def _forget_dead(self) -> None:
        """Drops the entries of deleted loaders, each time that the number of entries has doubled."""
        if len(self._by_loader) < self._cleanup_size:
            return
        self._by_loader = {
            key: probe
            for key, probe in self._by_loader.items()
            if key in (id(probe.loader()), id(probe.inner()))
        }
        self._cleanup_size = 2 * len(self._by_loader) + MOST_FOUND

    def _stand_in(self, made: Any) -> None:  # Any: a DataLoader
        """Treats a DataLoader that a framework makes from a given one, as accelerate's ``prepare`` does, as the given one."""
        if self._naming.closed:
            return
        with self._naming, self._lock:
            for probe in self.loaders.values():
                if not probe.given or probe.began_ns:  # the cheap test first: there may be thousands
                    continue
                inner = probe.inner()
                given = probe.loader() if inner is None else inner  # not ``or``, which calls ``__len__``
                if given is None or not _is_data_loader(given):
                    continue
                if given.dataset is made.dataset and is_passed(given):
                    probe.inner, self._by_loader[id(made)] = weakref.ref(made), probe
                    return

    def _probe_for(self, loader: Any) -> LoaderProbe | None:  # Any: a DataLoader
        """Returns the probe of a loader whose pass begins; None if that raises."""
        with self._guard:
            return self._begun_by(loader)
        return None

    def _begun_by(self, loader: Any) -> LoaderProbe:  # Any: a DataLoader
        probe = self._known(loader)
        if probe is None and self.patch is not None and not self.patch.made.at_ns(loader):
            self._stand_in(loader)  # its class does not call ``DataLoader.__init__``, like that of torchdata
            probe = self._known(loader)
        if probe is not None and probe.inner() is not loader:  # the given loader itself is iterated
            probe.inner = lambda: None
        if self._roots is not None:
            self._roots.loader_starts(new=probe is None)
        self._pass_starts()
        if probe is not None and self.loaders.get(probe.name) is probe:
            return probe
        with self._lock:  # two threads may begin at once, and use the same name for their loaders
            probe = self._known(loader)
            if probe is None:
                return self._add_at_place(self._place(loader), loader)
            self._reclaim_name(probe)
            return probe

    def _place(self, loader: Any) -> CallSite:  # Any: a DataLoader
        """Returns where a loader without a given name is iterated, and its name there; without one, the class of its dataset."""
        place = CallSite("", None)
        if not self._naming.closed:
            with self._naming:
                place = call_site_of(loader)
        name = place.name or type(attribute(loader, "dataset", loader)).__name__
        return place._replace(name=re.sub(_NOT_IN_NAMES, "_", name)[:MOST_CHARS])

    def _add_at_place(self, place: CallSite, loader: Any) -> LoaderProbe:  # Any: a DataLoader
        """Records a loader under the name of its place.

        A place has one name, and one more for each loader in use there at the same time: the i-th loader takes over the i-th
        name.
        """
        holders = self._places.setdefault(place.key, [])
        released = (n for n, holder in enumerate(holders) if self._is_released(holder, loader))
        number = next(released, len(holders))
        if number < len(holders):
            name = holders[number].name
        elif len(self._found) < MOST_FOUND:
            name = free_name(
                place.name, {**self.iterables, **dict.fromkeys(self._found | self._instrumented)}
            )
            self._found.add(name)
        else:
            name = OTHER
        probe = self._add_probe(Loader(loader, name=name))
        probe.given, probe.awaited = False, True
        if name != OTHER:
            holders[number : number + 1] = [probe]
        return probe

    def _is_released(self, holder: LoaderProbe, loader: Any) -> bool:  # Any: a DataLoader
        """Returns whether the holder of a name is no longer in use: deleted, or ``loader`` was created after its last pass began.

        Two loaders that both existed before the first of them was iterated are distinct, also if they alternate. Loaders
        created before instrumentation count as created at the start; those of classes other than DataLoader as created now.
        """
        gone = holder.loader() is None
        if holder.running or (holder.awaited and not gone):  # another thread may be starting it
            return False
        if gone or self.patch is None or not _is_data_loader(loader):
            return True
        return self.patch.made.at_ns(loader) > holder.began_ns

    def _reclaim_name(self, probe: LoaderProbe) -> None:
        """Returns its name to a loader that is iterated again after another one has taken the name over.

        The other one gets a name of its own at its next pass.
        """
        taken = self.loaders.get(probe.name)
        holders = next((each for each in self._places.values() if taken in each), None)
        if taken is None or taken is probe or holders is None:
            return
        holders[holders.index(taken)] = self.loaders[probe.name] = probe
        probe.inherit(taken)
        self._by_loader = {key: each for key, each in self._by_loader.items() if each is not taken}


def _is_data_loader(loader: Any) -> bool:  # Any: the user's own
    from torch.utils.data import DataLoader  # called only if torch has been imported

    found = False
    with suppress(Exception):  # ``__class__`` may be a property of the program
        found = isinstance(loader, DataLoader)
    return found


def _iterated_by_torch(loader: Any) -> Any:  # Any: the user's own
    """Returns the object that torch iterates in place of a fastai DataLoader; any other loader itself."""
    fastai = any(kind.__module__ == "fastai.data.load" for kind in type(loader).__mro__)
    return getattr(loader, "fake_l", loader) if fastai else loader


def _inner(loader: Any) -> Callable[[], Any]:  # Any: the user's own
    """Returns a function: the DataLoader in a wrapper that passes for one (accelerate) or has its dataset (Fabric), else None."""
    from torch.utils.data import DataLoader

    held = {} if issubclass(type(loader), DataLoader) else attribute(loader, "__dict__", {})
    for value in list(held.values()):
        if _is_data_loader(value):
            dataset = attribute(value, "dataset")
            if _is_data_loader(loader) or held.get("dataset") is dataset is not None:
                return weakref.ref(value)
    return lambda: None


class TorchProbes:
    """Instruments backward and optimizers."""

    def __init__(self, recorder: Recorder, scaled: ScaledUpdates) -> None:
        self._backward = BackwardProbe(recorder)
        self._optimizers = OptimizerProbe(recorder, scaled)
        self._edge = recorder.edge
        self._stepped_aside = False
        self.step_aside_for_compiler()

    def step_aside_for_compiler(self) -> None:
        """Excludes wrappers from compilation once the compiler is loaded, so that they cause no graph break."""
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        skip = getattr(compiler, "skip_code", None)
        if self._stepped_aside or skip is None:
            return
        self._stepped_aside = True
        for code in (*self._backward.codes, *codes_of_wrappers()):
            skip(code)
        whole = _skipper_of_whole_calls(compiler) or skip
        for code in (*self._optimizers.codes, getattr(self._edge, "__code__", None)):
            if code is not None:
                whole(code)

    def remove(self) -> None:
        """Removes all hooks."""
        self._backward.remove()
        self._optimizers.remove()


def _skipper_of_whole_calls(compiler: Any) -> Callable[[Any], None] | None:  # Any: torch._dynamo.eval_frame
    """Returns a function that excludes code, and all code that it calls, from compilation; None if torch lacks it.

    Not used for the wrapper of backward, which calls code of the user.
    """
    strategy = getattr(compiler, "FrameExecStrategy", None)
    set_strategy = getattr(compiler, "set_code_exec_strategy", None)
    action = getattr(sys.modules.get("torch._dynamo.types"), "FrameAction", None)
    if strategy is None or set_strategy is None or action is None:
        return None
    never = strategy(action.SKIP, action.SKIP)
    return lambda code: set_strategy(code, never)
