"""Instruments the forward of root modules and their parts, through the slot that ``Module.compile`` uses.

``Module.__call__`` calls ``self._compiled_call_impl`` when it is set. A wrapper there sees the outermost
call, is dropped by ``__getstate__`` (so pickles and deep copies do not contain it and are not timed as the
model), and adds no graph break, because it writes nothing while ``torch.compile`` traces. A copy of the module that got the
wrapper with a copy of ``__dict__`` loses it in its first call, and records nothing.

A part of a root is recorded where the program calls it while no instrumented forward is open in its thread, under the name
of the root; ``parts_of`` says which modules are parts.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.module_parts import modules_of, parameters_of, parts_of
from otel_train.instrumentation.naming import is_installed, is_ours, variables_of
from otel_train.recording import ring_buffer
from otel_train.recording.events import Flag, Op, SourceKind, code
from otel_train.safety import Guard, frames, replace

if TYPE_CHECKING:
    import torch

    from otel_train.recording.recorder import Recorder

SLOT = "_compiled_call_impl"
_REPLICATE = "_replicate_for_data_parallel"

MOST_LOOKED_INTO = 10_000
"""Most objects, nearest first, whose references are searched for modules compiled before the session (about 10 ms)."""

LONGEST_LOOKED_INTO = 1_000
"""Longest container that is searched: a longer one holds data rather than models."""

MOST_WAITING = 10 * MOST_LOOKED_INTO
"""Length from which the queue of this search takes no more objects."""

_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, deque)


def no_open_forward() -> Any:  # Any: a list of one number; memory of one word where hooks in C read it
    """Returns the cell for the identity of the thread in which an instrumented forward is open; 0 for none."""
    return [0] if ring_buffer.EXTENSION is None else bytearray(8)


class ModuleProbe:
    """Times the forwards of one root module, held weakly, and of its parts, until ``remove``.

    Args:
        open_in: see ``no_open_forward``; all probes of a session share it.
    """

    def __init__(self, model: torch.nn.Module, name: str, recorder: Recorder, open_in: Any) -> None:
        self.name = name
        self.model = weakref.ref(model)
        self.source = recorder.source(SourceKind.FORWARD, name)
        self.edge = recorder.edge
        self.open_in = open_in
        self._parts: list[_Slot] = []
        self._guard = Guard(f"finding parts of model {name!r}")
        part = _slot_of(model)
        if part is not None:  # it was recorded as a part of another root
            part.remove()
        wrap, self._wrap_part = _wrappers()
        self._slot = _Slot(model, self, wrap)
        self.attach_parts()

    def attach(self) -> None:
        """Takes the slot, also after ``Module.compile()`` has overwritten it."""
        self._slot.attach()

    def attach_parts(self) -> None:
        """Takes the slots of the model's present parts; gives back those of former parts, such as a replaced head."""
        model = self.model()
        if model is None:
            self.remove()  # its parts may be those of another model now
        elif not self._guard.closed:
            with self._guard:
                self._attach_parts_of(model)

    def _attach_parts_of(self, model: torch.nn.Module) -> None:
        known = {id(part): slot for slot in self._parts if (part := slot.model()) is not None}
        slots = [
            known.get(id(part)) or _Slot(part, self, functools.partial(self._wrap_part, part=number))
            for part, number in parts_of(model, taken=self._is_taken)
        ]
        kept = set(map(id, slots))
        for slot in self._parts:
            if id(slot) not in kept:
                slot.remove()
        for slot in slots:
            slot.attach()
        self._parts = slots

    def remove(self) -> None:
        """Gives the slots back. If other code has wrapped a wrapper, both stay, and the inner one forwards calls."""
        for slot in (self._slot, *self._parts):
            slot.remove()
        self._parts = []

    def _is_taken(self, module: torch.nn.Module) -> bool:
        slot = _slot_of(module)
        return slot is not None and slot not in self._parts


class _Slot:
    """The slot of one module, held weakly; it contains a wrapper from creation until ``remove``.

    Args:
        wrap: returns the wrapper, and the hook in C that it calls, if any. Arguments: the function that ``Module.__call__``
            calls if the slot is empty, what the slot contained, and ``probe``.
    """

    def __init__(self, model: torch.nn.Module, probe: ModuleProbe, wrap: Callable[..., Any]) -> None:
        self.model = weakref.ref(model, self._release)
        self.wrapper: MethodType | None = None
        self._hook: Any = None  # in C, if there is one
        self._probe = probe
        self._wrap = wrap
        self._replaced: Any = None
        self.attach()

    def attach(self) -> None:
        """Puts a wrapper into the slot, unless the slot contains it."""
        model = self.model()
        if model is None:
            return
        present = model.__dict__.get(SLOT)
        if present is not None and present is self.wrapper:
            return
        if _is_ours(present) and present.__self__.is_copied_to(model):
            present = None
        self._release()
        self._replaced = present
        wrapper, self._hook = self._wrap(type(model)._call_impl, present, self._probe)  # noqa: SLF001 - nothing else names it
        self.wrapper = MethodType(wrapper, _Bound.to(model, self))
        if self._hook is not None:
            self._hook.wrapper = weakref.ref(self.wrapper)
        model.__dict__[SLOT] = self.wrapper  # past __setattr__, which scripted modules override

    def remove(self) -> None:
        """Restores what the slot contained, unless other code has wrapped the wrapper."""
        model, wrapper = self.model(), self.wrapper
        self._release()
        if model is None or wrapper is None or model.__dict__.get(SLOT) is not wrapper:
            return
        if self._replaced is None:
            del model.__dict__[SLOT]
        else:
            model.__dict__[SLOT] = self._replaced

    def _release(self, _: object = None) -> None:
        self.wrapper = None  # copies of the module may still have it, or other code may have wrapped it
        if self._hook is not None:
            self._hook.wrapper = None


class _Bound(weakref.ref["torch.nn.Module"]):
    """The object to which a wrapper is bound as a method: a weak reference to the module.

    C reads the reference itself; a compiler can trace only ``model``. It is copied and pickled with the module's ``__dict__``:
    a deep copy is bound to the copied module, a pickle contains None for the slot, and a shallow copy of ``__dict__`` has the
    same object, see ``_instead``.
    """

    __slots__ = ("model", "slot")
    recorded = True
    model: Callable[[], Any]
    slot: _Slot

    @classmethod
    def to(cls, model: torch.nn.Module, slot: _Slot) -> _Bound:
        """Returns the object that binds the wrapper in ``slot`` to ``model``."""
        bound = cls(model)
        bound.model, bound.slot = weakref.ref(model), slot
        return bound

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        copied = memo.get(id(self()))
        return self if copied is None else _BoundToCopy.to(copied, _NO_SLOT)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {"call": None}  # a method is pickled as the attribute of this name

    def is_copied_to(self, module: object) -> bool:
        """Returns whether ``module`` got the wrapper with a copy of another module's ``__dict__``."""
        return not self.recorded or self.model() is not module


class _BoundToCopy(_Bound):  # in a deep copy of a module
    __slots__ = ()
    recorded = False


_NO_SLOT: Any = SimpleNamespace(wrapper=None)


def _instead(bound: _Bound, compiled: Callable[..., Any] | None) -> Callable[[Any, Any], Any] | None:
    """Returns a function that calls the copy of a module that has the wrapper; None if the called module is no copy.

    In a shallow copy, such as a clone in meta-learning, the wrapper would run the original's weights. The frame of
    ``Module.__call__`` has the called module. That look-up takes a microsecond, so it is made only if there are more than
    ``_references`` references to the wrapper.
    """
    frame = next(itertools.islice(frames(), 3, None), None)  # past ``frames``, this function and the wrapper
    if frame is None or frame.f_code is not _call_of_torch().__code__:
        return None
    module = frame.f_locals.get("self")
    return functools.partial(_call_copy, module, compiled) if bound.is_copied_to(module) else None


def _call_copy(
    module: Any, compiled: Callable[..., Any] | None, args: Any, kwargs: Any
) -> Any:  # Any: as above
    """Calls a copy after its wrapper has been removed."""
    if compiled is None:
        module.__dict__.pop(SLOT, None)
    else:
        module.__dict__[SLOT] = compiled
    return _call_of_torch()(module, *args, **kwargs)


def _call_of_torch() -> Any:  # Any: a function of torch
    """Returns the function that ``Module.__call__`` is in torch, also if a program has replaced ``Module.__call__``."""
    import torch

    return vars(torch.nn.Module)["_wrapped_call_impl"]


@functools.cache
def _references(*, in_c: bool) -> int:
    """Returns the number of references to a wrapper during a call of the only module that has it: ``__dict__``, ``_Slot``, the call.

    It is measured with a module without parameters, and counted as the hook does, ``in_c`` or in Python.
    """
    import torch

    module, slot, counts = torch.nn.Module(), SimpleNamespace(), []

    def call(bound: Any) -> None:
        counts.append(
            ring_buffer.EXTENSION.references(bound.weakly) if in_c else sys.getrefcount(bound.slot.wrapper)
        )

    bound = SimpleNamespace(slot=slot)
    slot.wrapper = module.__dict__[SLOT] = MethodType(call, bound)
    bound.weakly = weakref.ref(slot.wrapper)
    _call_of_torch()(module)
    return counts[0]


def _slot_of(module: torch.nn.Module) -> _Slot | None:
    """Returns the slot object of ``module``; None if its slot contains no wrapper, or that of a module it was copied from."""
    present = module.__dict__.get(SLOT)
    return present.__self__.slot if _is_ours(present) and not present.__self__.is_copied_to(module) else None


def _is_ours(present: Any) -> bool:  # Any: what a slot holds
    return isinstance(getattr(present, "__self__", None), _Bound)


def barrier_of(probes: Iterable[ModuleProbe]) -> str:
    """Returns the stage in which the models wait for other ranks, by the names of their classes; "" if unknown."""
    names = {kind.__name__ for probe in probes for kind in _kinds(probe.model())}
    if any(name.startswith("FSDP") or name == "FullyShardedDataParallel" for name in names):
        return "forward"
    return "backward" if "DistributedDataParallel" in names else ""


def _kinds(model: Any) -> tuple[type, ...]:  # Any: a module, a compiled one, or None
    parts = getattr(model, "__dict__", {}).get("_modules")
    inside = parts.get("_orig_mod") if isinstance(parts, dict) else None  # a scripted model has another table
    return (*type(model).__mro__, *type(inside).__mro__)


class ModulePatch:
    """Patches three rarely called functions that would overwrite a wrapper or copy it to another module.

    ``Module.compile`` overwrites the slot; ``torch.compile`` makes a new module around an instrumented one;
    ``DataParallel`` copies ``__dict__`` into its replicas, which would run the original's weights.
    ``torch.jit.script`` and ``trace`` are kept from compiling what is in the slot.

    Args:
        reattach: called after something has been compiled.
        compiled: called with each compiled module, and the module that the loop calls now: the result of ``torch.compile``, or
            the module itself after ``Module.compile``.
    """

    def __init__(
        self, reattach: Callable[[], None], compiled: Callable[[torch.nn.Module, torch.nn.Module], None]
    ) -> None:
        import torch

        self._reattach, self._compiled = reattach, compiled
        self._guard = Guard("following compiled models", limit=sys.maxsize)
        self._undo: list[Callable[[], None]] = []
        self._after(torch.nn.Module, "compile", lambda module, _: self._notify(module, module))
        self._after(torch.nn.Module, _REPLICATE, lambda _, replica: replica.__dict__.pop(SLOT, None))
        self._after(torch, "compile", self._notify)
        self._hide_from_scripting()

    def remove(self) -> None:
        """Puts the methods back, unless other code has wrapped ours."""
        for undo in self._undo:
            undo()

    def _hide_from_scripting(self) -> None:
        ignored = getattr(sys.modules.get("torch.jit._recursive"), "ignored_attributes", None)
        if isinstance(ignored, list) and SLOT not in ignored:
            ignored.append(SLOT)
            self._undo.append(lambda: ignored.remove(SLOT))

    def _notify(self, model: Any, made: Any) -> None:
        import torch

        with self._guard:
            self._reattach()
            if isinstance(model, torch.nn.Module) and isinstance(made, torch.nn.Module):
                self._compiled(model, made)

    def _after(self, owner: Any, name: str, then: Callable[[Any, Any], object]) -> None:
        def notifying(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                then(args[0] if args else kwargs.get("model"), result)
                return result

            return wrapper

        self._undo.append(replace(owner, name, notifying))


def compiled_before() -> list[torch.nn.Module]:
    """Returns the modules that were compiled before the session, by ``torch.compile`` or ``Module.compile``.

    They are searched from the calling program: in the variables of the calling functions and their modules, in the
    closures and objects found there, and so on, nearest first, in at most ``MOST_LOOKED_INTO`` objects. Not searched if
    nothing was compiled: an optimizer alone loads the compiler.
    """
    if not _may_have_compiled():
        return []
    module = sys.modules["torch"].nn.Module
    return [each for each in _within_reach() if module in type(each).__mro__ and is_compiled(each)]


def _may_have_compiled() -> bool:
    """Returns whether ``torch.compile`` or ``Module.compile`` was called; also True if that is not known.

    Both call ``get_compiler_fn``, which imports a module that nothing else imports (checked in torch 2.15). If its code
    does not name that module, torch has changed, and it is not known.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    code = getattr(getattr(dynamo, "get_compiler_fn", None), "__code__", None)
    known = code is not None and _IMPORTED_TO_COMPILE in code.co_names
    return not known or f"torch._dynamo.{_IMPORTED_TO_COMPILE}" in sys.modules


_IMPORTED_TO_COMPILE = "repro.after_dynamo"


def is_compiled(model: torch.nn.Module) -> bool:
    """Returns whether a module is a result of ``torch.compile``, or ``Module.compile`` was called on it."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    present = model.__dict__.get(SLOT)
    return type(model) is kind or (present is not None and not _is_ours(present))


def _within_reach() -> Iterator[Any]:
    """Yields the objects that can be reached from the calling frames, nearest first, each once. Runs none of their code."""
    todo: deque[Any] = deque()
    for frame in frames():
        if not is_ours(frame):
            todo += [*variables_of(frame).values(), *frame.f_globals.values()]
    held: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
    searched = 0
    while todo and searched < MOST_LOOKED_INTO:
        thing = todo.popleft()
        if not gc.is_tracked(thing) or id(thing) in held:  # an untracked object refers to no module
            continue
        held[id(thing)] = thing
        yield thing
        inner = _held_by(thing)
        searched += bool(inner)
        if len(todo) < MOST_WAITING:
            todo += inner


def _held_by(thing: Any) -> Sequence[Any]:
    """Returns the objects to which ``thing`` refers, as far as they may lead to models of the program."""
    kind = type(thing)
    if issubclass(kind, ModuleType):
        path = thing.__dict__.get("__file__")
        return list(thing.__dict__.values()) if path and not is_installed(path) else ()
    if issubclass(kind, FunctionType):  # not its globals, which are those of a whole module
        return thing.__closure__ or ()
    if issubclass(kind, (type, CodeType, FrameType, _Bound)):
        return ()
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base is not None and base.__len__(thing) > LONGEST_LOOKED_INTO:
        return ()
    return gc.get_referents(thing)


def is_or_wraps(outer: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Returns whether ``outer`` is ``model`` or a wrapper of it, such as ``DistributedDataParallel``.

    A wrapper contains ``model`` and has no other parameters; a larger model of which ``model`` is a part has others.
    """
    if outer is model:
        return True
    if not any(part is model for part in modules_of(outer)):
        return False
    return sum(1 for _ in parameters_of(outer)) == sum(1 for _ in parameters_of(model))


# Neither function records a part inside an open forward, or one that a backward recomputes (activation checkpointing).


def _timed(
    go_on: Callable[..., Any],
    compiled: Callable[..., Any] | None,
    probe: ModuleProbe,
    *,
    task_of_backward: Callable[[], int] | None = None,
    part: int = 0,
) -> tuple[Callable[..., Any], None]:
    """Returns a wrapper in Python, and None for the hook in C. ``task_of_backward`` is given for a part of a model only."""
    edge, open_in, references = probe.edge, probe.open_in, _references(in_c=False)
    is_grad_enabled, count_of = sys.modules["torch"].is_grad_enabled, sys.getrefcount
    (is_compiling, compiler), (end, fail, evaluating, training) = _compiler(), _codes(probe.source, part)

    def call(bound: _Bound, /, *args: Any, **kwargs: Any) -> Any:
        model = bound.model()
        if is_compiling() or compiler._is_compiling_flag:  # noqa: SLF001 - see _compiler
            return go_on(model, *args, **kwargs) if compiled is None else compiled(*args, **kwargs)
        if count_of(bound.slot.wrapper) > references and (instead := _instead(bound, compiled)) is not None:
            return instead(args, kwargs)
        here, outer = get_ident(), open_in[0]
        if task_of_backward is not None and (outer == here or task_of_backward() != -1):
            return go_on(model, *args, **kwargs) if compiled is None else compiled(*args, **kwargs)
        try:
            mode = training if model.training else evaluating
        except Exception:  # it is a property of the program
            mode = training
        edge(mode[is_grad_enabled()])
        open_in[0] = here
        try:
            result = go_on(model, *args, **kwargs) if compiled is None else compiled(*args, **kwargs)
        except BaseException:
            edge(fail)
            raise
        finally:
            if outer != here:  # 0, never back to another thread, whose forward may have ended by now
                open_in[0] = 0
        edge(end)
        return result

    return call, None


def _timed_in_c(
    go_on: Callable[..., Any],
    compiled: Callable[..., Any] | None,
    probe: ModuleProbe,
    *,
    task_of_backward: Callable[[], int] | None = None,
    part: int = 0,
) -> tuple[Callable[..., Any], Any]:
    """Returns a wrapper, and the hook in C that it calls unless a compiler traces it. ``task_of_backward``: see ``_timed``."""
    import torch

    is_compiling, compiler = _compiler()
    end, fail, evaluating, training = _codes(probe.source, part)
    state = (
        probe.edge,
        go_on if compiled is None else compiled,
        compiled is not None,
        probe.open_in,
        torch.is_grad_enabled,
        task_of_backward,
        _Bound,
        vars(compiler),
        _instead,
        ring_buffer.packed(end, fail, *evaluating, *training),
    )
    forward = ring_buffer.EXTENSION.hook("forward", state)
    forward.references = _references(in_c=True)

    def call(bound: _Bound, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return go_on(bound.model(), *args, **kwargs) if compiled is None else compiled(*args, **kwargs)
        return forward(bound, args, kwargs)

    return call, forward


def _codes(source: int, part: int) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Returns the codes of end, failure, and begins in evaluation and in training mode, each without and with gradients."""
    plain, grad, training, both = (
        code(Op.BEGIN, source, flags, part)
        for flags in (0, Flag.GRAD, Flag.TRAINING, Flag.TRAINING | Flag.GRAD)
    )
    return code(Op.END, source), code(Op.FAIL, source), (plain, grad), (training, both)


def _compiler() -> tuple[Callable[[], bool], Any]:
    """Returns a function, and an object with ``_is_compiling_flag``: one of both is true while a compiler traces or exports.

    ``torch.compiler.is_compiling`` checks both and more, which takes 0.1 µs longer.
    """
    import torch

    compiler = torch.compiler
    if hasattr(compiler, "_is_compiling_flag"):
        return compiler.is_dynamo_compiling, compiler
    return compiler.is_compiling, SimpleNamespace(_is_compiling_flag=False)


def _wrappers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the functions that make the wrapper of a root and that of a part."""
    import torch

    wrap = _timed if ring_buffer.EXTENSION is None else _timed_in_c
    task = torch._C._current_graph_task_id  # noqa: SLF001 - the only way to ask
    return wrap, functools.partial(wrap, task_of_backward=task)


def codes_of_wrappers() -> list[CodeType]:
    """Returns the code objects that a compiler must not trace."""
    return [
        constant
        for make in (_timed, _timed_in_c)
        for constant in make.__code__.co_consts
        if isinstance(constant, CodeType)
    ]


def kind_of_device(model: Any) -> str:
    """Returns torch's type of the device that has the first parameter of a model; "" if there is none."""
    first = None if model is None else next(parameters_of(model), None)
    return "" if first is None else str(first.device.type)
