"""The forward of a root module, seen in the slot that ``Module.compile`` uses.

``Module.__call__`` calls ``self._compiled_call_impl`` when it is set. A wrapper there sees the outermost
call, is dropped by ``__getstate__`` (so pickles and deep copies are clean and are not timed as the
model), and adds no graph break, because under ``torch.compile`` it steps aside.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

from otel_train.codes import Flag, Op, SourceKind, code
from otel_train.record.replaced import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from otel_train.record.recorder import Recorder

SLOT = "_compiled_call_impl"
_REPLICATE = "_replicate_for_data_parallel"


class ModuleProbe:
    """Times the forwards of one root module until ``remove``.

    Args:
        model: held weakly.
        name: as it reads in every figure.
        recorder: takes the edges.
    """

    def __init__(self, model: torch.nn.Module, name: str, recorder: Recorder) -> None:
        self.name = name
        self.model = weakref.ref(model)
        self.source = recorder.source(SourceKind.FORWARD, name)
        self._edge = recorder.edge
        self._wrapper: Callable[..., Any] | None = None
        self._replaced: Any = None
        self.attach()

    def attach(self) -> None:
        """Take the slot, also after ``Module.compile()`` has overwritten it."""
        model = self.model()
        if model is None:
            return
        present = model.__dict__.get(SLOT)
        if present is not None and present is self._wrapper:
            return
        self._replaced = present
        self._wrapper = _timed(model, present, self.source, self._edge)
        model.__dict__[SLOT] = self._wrapper  # past __setattr__, which scripted modules override

    def remove(self) -> None:
        """Give the slot back. What somebody put over ours stays theirs: ours passes through."""
        model = self.model()
        if model is None or model.__dict__.get(SLOT) is not self._wrapper:
            return
        if self._replaced is None:
            del model.__dict__[SLOT]
        else:
            model.__dict__[SLOT] = self._replaced


def barrier_of(probes: Iterable[ModuleProbe]) -> str:
    """The stage in which the models wait for other ranks; "" if that cannot be told from their classes."""
    names = {kind.__name__ for probe in probes for kind in _kinds(probe.model())}
    if any(name.startswith("FSDP") or name == "FullyShardedDataParallel" for name in names):
        return "forward"
    return "backward" if "DistributedDataParallel" in names else ""


def _kinds(model: Any) -> tuple[type, ...]:  # Any: a module, a compiled one, or None
    inside = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod")
    return (*type(model).__mro__, *type(inside).__mro__)


class ModulePatch:
    """Three rare methods that would otherwise lose a probe, or carry it where it does not belong.

    ``Module.compile`` overwrites the slot; ``torch.compile`` makes a new module around a watched one;
    ``DataParallel`` copies ``__dict__`` into its replicas, which would run the original's weights.

    Args:
        reattach: called after something has been compiled.
        compiled: told of every (module, what the loop calls now): what ``torch.compile`` made of it, or itself
            where it has compiled itself.
    """

    def __init__(
        self, reattach: Callable[[], None], compiled: Callable[[torch.nn.Module, torch.nn.Module], None]
    ) -> None:
        import torch

        self._undo: list[Callable[[], None]] = []
        self._after(
            torch.nn.Module, "compile", lambda module, _: self._tell(reattach, compiled, module, module)
        )
        self._after(torch.nn.Module, _REPLICATE, lambda _, replica: replica.__dict__.pop(SLOT, None))
        self._after(torch, "compile", lambda model, made: self._tell(reattach, compiled, model, made))

    def remove(self) -> None:
        """Put the methods back, unless somebody has wrapped ours."""
        for undo in self._undo:
            undo()

    @staticmethod
    def _tell(
        reattach: Callable[[], None], compiled: Callable[[Any, Any], None], model: Any, made: Any
    ) -> None:
        import torch

        reattach()
        if isinstance(model, torch.nn.Module) and isinstance(made, torch.nn.Module):
            compiled(model, made)

    def _after(self, owner: Any, name: str, then: Callable[[Any, Any], object]) -> None:
        def telling(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                then(args[0] if args else kwargs.get("model"), result)
                return result

            return wrapper

        self._undo.append(replace(owner, name, telling))


def compiled_forms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What was compiled of ``model``, or of a wrapper around it, before anybody asked.

    That is what ``torch.compile`` has made, and wrappers that have compiled themselves. A look through everything
    that lives, once per model that is given, and only where the compiler is loaded.
    """
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if kind is None:
        return []
    living, module = gc.get_objects(), sys.modules["torch"].nn.Module
    made = [thing for thing in living if type(thing) is kind]
    itself = [thing for thing in living if module in type(thing).__mro__ and thing.__dict__.get(SLOT)]
    return [
        *(one for one in made if is_or_wraps(one.get_submodule("_orig_mod"), model)),
        *(one for one in itself if type(one) is not kind and one is not model and is_or_wraps(one, model)),
    ]


def is_or_wraps(outer: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether calling ``outer`` is calling ``model``: it holds it, and no parameter beside its parameters.

    So do ``DistributedDataParallel`` and its kin; a larger model of which ``model`` is a part does not.
    """
    if outer is model:
        return True
    if not any(part is model for part in outer.modules()):
        return False
    return sum(1 for _ in outer.parameters()) == sum(1 for _ in model.parameters())


def _timed(
    model: torch.nn.Module,
    compiled: Callable[..., Any] | None,
    source: int,
    edge: Callable[[int], None],
) -> Callable[..., Any]:
    import torch

    is_compiling = torch.compiler.is_compiling
    is_grad_enabled = torch.is_grad_enabled
    evaluating = (code(Op.BEGIN, source), code(Op.BEGIN, source, Flag.GRAD))
    training = (
        code(Op.BEGIN, source, Flag.TRAINING),
        code(Op.BEGIN, source, Flag.TRAINING | Flag.GRAD),
    )
    end, fail = code(Op.END, source), code(Op.FAIL, source)
    owner = weakref.ref(model)
    call_impl = type(model)._call_impl  # noqa: SLF001 - what Module.__call__ itself goes on to

    def call(*args: Any, **kwargs: Any) -> Any:
        model = owner()
        assert model is not None  # it is being called
        if is_compiling():
            return call_impl(model, *args, **kwargs) if compiled is None else compiled(*args, **kwargs)
        edge((training if model.training else evaluating)[is_grad_enabled()])
        try:
            result = call_impl(model, *args, **kwargs) if compiled is None else compiled(*args, **kwargs)
        except BaseException:
            edge(fail)
            raise
        edge(end)
        return result

    return call
