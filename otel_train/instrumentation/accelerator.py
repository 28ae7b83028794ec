"""What the timer of devices asks of an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from otel_train.records import DeviceMemory


class DeviceDriver(Protocol):
    """An accelerator: ``CudaDriver``, or a made-up one with a clock of its own. Events are its own affair.

    Attributes:
        device_type: what torch calls devices of this kind, such as ``cuda``.
    """

    device_type: str

    def current(self) -> int:
        """Device that the calling thread uses where it names none."""

    def devices(self) -> Sequence[int]:
        """Devices that this process computes on; none before it does. Starts nothing."""

    def capturing(self) -> bool:
        """Whether the calling thread is capturing a graph: its work is not run now."""

    def new_event(self, device: int) -> Any:
        """An event that can be recorded on ``device`` any number of times."""

    def spare(self, device: int) -> list[Any]:
        """Events of ``device`` that nobody uses, to take from and to give back to: the next session has them again."""

    def recorder(self, device: int) -> Callable[[Any], None]:
        """What lets the current stream of ``device`` write its clock into an event when it gets there."""

    def stamp(self, device: int) -> Any:
        """An event on a stream where nothing else is: the device gets to it at once. None where it cannot be.

        It is free again once the next but one has been asked for.
        """

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        """Queue a copy of a number to the host; what gives it once it has arrived, and None before."""

    def reading(self, device: int) -> AbstractContextManager[None]:
        """A block in which the calling thread may read events, whatever other threads capture."""

    def query(self, event: Any) -> bool:
        """Whether the stream got there."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Nanoseconds on the device clock between two events that it got to."""

    def synchronize(self, device: int) -> None:
        """Wait until ``device`` has done everything."""

    def hardware_ids(self) -> dict[str, str]:
        """Name and UUID of every device in use."""

    def memory(self) -> list[DeviceMemory]:
        """What the allocator of every device in use says."""

    def taken(self) -> dict[str, int]:
        """Bytes of every device in use that are taken, by whomever, as its driver says."""
