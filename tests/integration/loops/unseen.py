"""Loops that call their model past the place where calls can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.integration.loops.truth import Net, Truth, Watch, learn, loader, loss_of, sgd

if TYPE_CHECKING:
    from collections.abc import Callable


class Bypassing(Net):
    """A ``__call__`` that never reaches the usual one."""

    def __call__(self, x: Any) -> Any:
        return self.forward(x)


def a_call_that_is_bypassed(watch: Watch) -> Truth:
    """Own ``__call__``."""
    model, train, truth = Bypassing(), loader(10), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train})
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            learn(truth, model, optimizer, batch)
            truth.step()
    return truth


def a_forward_that_is_called_directly(watch: Watch) -> Truth:
    """``model.forward(x)``."""
    model, train, truth = Net(), loader(10), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train})
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            optimizer.zero_grad()
            truth.forward()
            loss = loss_of(model.forward, batch)
            truth.backward()
            loss.backward()
            optimizer.step()
            truth.update()
            truth.step()
    return truth


UNSEEN: dict[str, Callable[[Watch], Truth]] = {
    program.__name__: program for program in (a_call_that_is_bypassed, a_forward_that_is_called_directly)
}
