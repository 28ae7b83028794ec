"""What JAX has compiled, and what a program adds so that its steps are seen."""

from __future__ import annotations

from typing import NamedTuple

from otel_train.clock import NS_PER_S

JAX_STEP = ("stage", "make_step")
"""What is missing, as ``unobserved`` names it, where a program does not say what its step is."""

_NO_STEP = "no training step was seen. "
_ADD_STEP = (
    "Add `step = otel_train.jax.make_step(step)` around the compiled function that updates the parameters"
)
_ADD_LOADER = ", and iterate `otel_train.watch(loader)` to see the waits for batches"
_EXAMPLE = "docs/howto/jax.md has an example"


class JaxCompiles(NamedTuple):
    """What JAX has compiled.

    Attributes:
        functions: how many compilations there were.
        total_ns: their time together.
        longest: the function of the program's whose compilation took longest; "" if none is known.
        longest_ns: how long that took.
        since_ns: when the first one began.
    """

    functions: int = 0
    total_ns: int = 0
    longest: str = ""
    longest_ns: int = 0
    since_ns: int = 0

    def plus(self, begun_ns: int, ended_ns: int, function: str) -> JaxCompiles:
        """One more compilation, of ``function``; "" for one that is not the program's."""
        lasted_ns = ended_ns - begun_ns
        longer = bool(function) and lasted_ns > self.longest_ns
        return JaxCompiles(
            self.functions + 1,
            self.total_ns + lasted_ns,
            function if longer else self.longest,
            lasted_ns if longer else self.longest_ns,
            self.since_ns or begun_ns,
        )

    def told(self, now_ns: int) -> str:
        """What has been seen, up to now: half a sentence."""
        if not self.functions:
            return "JAX is imported"
        functions = "1 function" if self.functions == 1 else f"{self.functions} functions"
        longest = f" (longest: `{self.longest}`)" if self.longest else ""
        ran_s = max(0, now_ns - self.since_ns) / NS_PER_S
        return (
            f"JAX compiled {functions} in {self.total_ns / NS_PER_S:.1f} s{longest} and the program has run for "
            f"{ran_s:.1f} s since"
        )


def without_step(seen: str, *, loader: bool) -> str:
    """What is said of a program of JAX in which no training step was seen.

    Args:
        seen: what was, as ``JaxCompiles.told`` says it.
        loader: say how the loader is seen, too.
    """
    return f"{seen}; {_NO_STEP}{_ADD_STEP}{_ADD_LOADER if loader else ''}. {_EXAMPLE}"


def what_to_add(reason: str) -> str:
    """The part of such a text that says what to do."""
    return reason.partition(_NO_STEP)[2]
