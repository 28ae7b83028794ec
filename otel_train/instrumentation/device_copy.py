"""Times copies between host and device at the methods of ``Tensor``."""

from __future__ import annotations

import sys
from _thread import get_ident
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from otel_train.errors import imported
from otel_train.recording.events import MAX_PAYLOAD, PAYLOAD_SHIFT, SourceKind, begin_end_fail

if TYPE_CHECKING:
    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.recording.recorder import Recorder

PINNED = "pin_memory"
"""Source name of copies into pinned memory, which stay on the host."""

_CURRENT, _ELSEWHERE = -1, -2  # in place of a device number: the current device; no device of the accelerator


class TransferProbe:
    """Times copies of tensors from the host to a device, once a device is in use.

    ``Tensor.to``, ``Tensor.cuda`` (on Intel devices ``Tensor.xpu``) and ``Tensor.pin_memory`` are replaced by descriptors that
    return the original for the class, and for every tensor that is not on the host, so that comparisons by subclasses and the
    compiler see the original (docs/decisions/0009). Not recorded: parameters, what ``Module.to`` moves, calls inside compiled
    code, calls through the class, threads that do not train.
    """

    def __init__(
        self,
        recorder: Recorder,
        driver: DeviceDriver,
        *,
        find_torch: Callable[[], Any] = lambda: imported("torch"),
    ) -> None:
        self._recorder = recorder
        self._driver = driver
        self._find_torch = find_torch
        self._methods: list[_Method] = []
        self._to_host: dict[tuple[int, int], int] = {}
        """Bytes by thread and device. Only the thread itself adds to its own, so that no addition is lost."""
        self._removed = False

    def poll(self) -> None:
        """Installs the descriptors once a device is in use. Called by the service thread."""
        torch = self._find_torch()
        if not self._methods and not self._removed and hasattr(torch, "Tensor") and self._driver.devices():
            self._install(torch)

    def copied_to_host(self) -> dict[str, int]:
        """Returns the bytes that ``Tensor.cpu`` copied to the host, by device. Called by the service thread."""
        copied: Counter[int] = Counter()
        for (_, index), size in list(self._to_host.items()):
            copied[index] += size
        return {f"{self._driver.device_type}:{index}": size for index, size in copied.items()}

    def remove(self) -> None:
        """Removes the descriptors. One that another library has wrapped stays and only forwards calls."""
        self._removed = True
        for method in self._methods:
            method.remove()

    def _install(self, torch: Any) -> None:
        aim = _TargetDevice(torch, self._driver, self._recorder)
        quiet = torch.DisableTorchFunctionSubclass  # ``__torch_function__`` of a subclass must not be called
        size = _sizes(quiet)
        leaving, coming = _watching(torch, quiet, on_host=True), _watching(torch, quiet, on_host=False)
        pinned = begin_end_fail(self._recorder.source(SourceKind.H2D, PINNED))
        away = partial(_sending, recorder=self._recorder, torch=torch, size=size)
        for name, make, watches in (
            ("to", partial(away, aim=aim.words), leaving),
            ("xpu" if self._driver.device_type == "xpu" else "cuda", partial(away, aim=aim.words), leaving),
            ("pin_memory", partial(away, aim=lambda *_: pinned), leaving),
            ("cpu", partial(self._counted, size=size, device_of=_devices(quiet)), coming),
        ):
            self._methods.append(_Method(torch.Tensor, name, make, watches))
        if self._removed:  # meanwhile, by the thread that closes the session
            self.remove()

    def _counted(
        self, original: Callable[..., Any], *, size: Callable[[Any], int], device_of: Callable[[Any], int]
    ) -> Callable[..., Any]:
        to_host = self._to_host

        def cpu(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            nbytes, index = size(result), device_of(tensor)
            if nbytes > 0 and index >= 0:
                key = get_ident(), index
                to_host[key] = to_host.get(key, 0) + nbytes
            return result

        return cpu


class _Method:
    """A descriptor that returns the original for the class and a wrapper for some instances."""

    def __init__(
        self,
        owner: type,
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        watches: Callable[[Any], bool],
    ) -> None:
        self._owner, self._name = owner, name
        self._before = owner.__dict__.get(name)
        self._original = getattr(owner, name)
        self._bind = self._original.__get__
        self._wrapper: Callable[..., Any] | None = make(self._original)
        self._wrapper.__name__ = name  # a bound method is pickled by this name
        self._watches = watches
        setattr(owner, name, self)

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        if tensor is None:
            return self._original
        wrapper = self._wrapper
        if wrapper is None or not self._watches(tensor):
            return self._bind(tensor, owner)
        return MethodType(wrapper, tensor)

    def remove(self) -> None:
        self._wrapper = None
        if self._owner.__dict__.get(self._name) is not self:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class _TargetDevice:
    """Resolves the target device of a call to its event codes."""

    def __init__(self, torch: Any, driver: DeviceDriver, recorder: Recorder) -> None:
        self._torch = torch
        self._driver = driver
        self._recorder = recorder
        self._known: dict[Any, int] = {None: _ELSEWHERE}
        self._codes: dict[int, tuple[int, int, int]] = {}

    def words(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, int] | None:
        """Returns (begin, end, fail) of a move to the accelerator; None for anything else."""
        target = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if name != "to" and target is None:
            index = _CURRENT
        else:
            if isinstance(target, self._torch.Tensor):
                target = target.device
            known = self._known.get(target)
            index = self._learn(target) if known is None else known
        if index == _ELSEWHERE:
            return None
        if index == _CURRENT:
            index = self._driver.current()
        return self._codes.get(index) or self._register(index)

    def _learn(self, target: Any) -> int:
        index = _ELSEWHERE
        if isinstance(target, int):
            index = target
        elif isinstance(target, (str, self._torch.device)):
            device = self._torch.device(target)
            if device.type == self._driver.device_type:
                index = _CURRENT if device.index is None else device.index
        self._known[target] = index
        return index

    def _register(self, index: int) -> tuple[int, int, int]:
        name = f"{self._driver.device_type}:{index}"
        words = self._codes[index] = begin_end_fail(self._recorder.source(SourceKind.H2D, name))
        return words


def _sending(
    original: Callable[..., Any],
    *,
    aim: Callable[..., tuple[int, int, int] | None],
    recorder: Recorder,
    torch: Any,
    size: Callable[[Any], int],
) -> Callable[..., Any]:
    """Wraps ``original`` with an event before and after moving a batch."""
    edge, has_own_ring, owner = recorder.edge, recorder.has_own_ring, recorder.main.ident
    name, parameter, caller = original.__name__, torch.nn.Parameter, sys._getframe  # noqa: SLF001  # as logging does
    moving = torch.nn.Module._apply.__code__  # noqa: SLF001  # what Module.to, .cuda and .half all call

    def send(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            words = aim(name, args, kwargs)
            if words is not None and (
                (get_ident() != owner and not has_own_ring())
                or isinstance(tensor, parameter)
                or getattr(caller(1).f_back, "f_code", None) is moving
            ):
                words = None
        except (
            Exception
        ):  # of a wrong argument, of which the original raises its own, or of the program's class
            words = None
        if words is None:
            return original(tensor, *args, **kwargs)
        begin, end, fail = words
        edge(begin)
        try:
            result = original(tensor, *args, **kwargs)
        except BaseException:
            edge(fail)
            raise
        edge(end | (size(result) + 1) << PAYLOAD_SHIFT)
        return result

    return send


def _sizes(quiet: Any) -> Callable[[Any], int]:
    """Returns a function: the bytes of a tensor, or -1 if unknown; ``__torch_function__`` is not called."""

    def size(tensor: Any) -> int:
        try:
            with quiet():
                nbytes = int(tensor.nbytes)
        except Exception:  # a sparse tensor (COO) has none, and a subclass may raise anything
            nbytes = _bytes_of_sparse(tensor, quiet)
        return nbytes if -1 <= nbytes < MAX_PAYLOAD else -1

    return size


def _bytes_of_sparse(tensor: Any, quiet: Any) -> int:
    """Returns the bytes of indices and values of a sparse tensor (COO); -1 for any other."""
    nbytes = -1
    with suppress(Exception), quiet():
        nbytes = sum(int(getattr(tensor, part)().nbytes) for part in ("_indices", "_values"))
    return nbytes


def _devices(quiet: Any) -> Callable[[Any], int]:
    """Returns a function: the number of a tensor's device, or -1 if unknown; ``__torch_function__`` is not called."""

    def device_of(tensor: Any) -> int:
        try:
            with quiet():
                return int(tensor.get_device())
        except Exception:  # as above
            return -1

    return device_of


def _watching(torch: Any, quiet: Any, *, on_host: bool) -> Callable[[Any], bool]:
    """Returns a function: whether a tensor is on the host, or else on a device, and may be a batch; no subclass is called."""
    plain, untraced = torch.Tensor, torch.Tensor.__torch_dispatch__
    real: dict[type, bool] = {}

    def watches(tensor: Any) -> bool:
        kind = type(tensor)
        if kind is plain:
            return tensor.is_cpu is on_host
        try:
            if kind not in real:  # with its own dispatch it may have no data, or inner tensors that are timed
                real[kind] = kind.__torch_dispatch__ is untraced
            if not real[kind]:
                return False
            with quiet():
                return bool(tensor.is_cpu is on_host)
        except Exception:  # a subclass may raise anything
            return False

    return watches
