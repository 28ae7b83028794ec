"""Each way of calling a function, bare and timed: prints what came out, and what was counted, as JSON."""

from __future__ import annotations

import tests.integration.jax_programs.without_torch  # isort: skip  # noqa: F401 - before anything that would import it

import json
import sys
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import otel_train

ONES = jnp.arange(4, dtype=jnp.float32)


def square(x: Any) -> Any:
    return (x * x).sum()


def repeated(x: Any, *, times: int) -> Any:
    return jnp.concatenate([x] * times)


def tree(x: Any, *, times: int = 2) -> Any:
    return {"twice": [x * times, None], "text": "as it is", "number": times}


class Scaled:
    """Has a timed method."""

    by = 3.0

    @otel_train.jax.make_step
    def scale(self, x: Any) -> Any:
        """Scale it."""
        return x * self.by


def bits(result: Any) -> Any:
    """What came out, to the bit."""
    return [
        np.asarray(leaf).tobytes().hex() if isinstance(leaf, jax.Array) else repr(leaf)
        for leaf in jax.tree_util.tree_leaves(result)
    ]


def ways(watch: Any) -> dict[str, Any]:
    """Everything that is done with a function, once with ``watch`` around it."""
    donating = watch(jax.jit(lambda x: x + 1, donate_argnums=0))
    given = ONES * 2
    found = {
        "donated": [bits(donating(given)), given.is_deleted()],
        "static": bits(watch(jax.jit(repeated, static_argnames="times"))(ONES, times=5)),
        "tree": bits(watch(tree)(ONES)),
        "jit of it": bits(jax.jit(watch(square))(ONES)),
        "grad of it": bits(jax.grad(watch(square))(ONES)),
        "vmap of it": bits(jax.vmap(watch(square))(jnp.ones((3, 2)))),
        "scan of it": bits(jax.lax.scan(watch(lambda carry, x: (carry + x, carry)), jnp.float32(0), ONES)),
        "it of grad": bits(watch(jax.value_and_grad(square))(ONES)),
        "it of vmap": bits(watch(jax.vmap(square))(jnp.ones((3, 2)))),
        "partial": bits(watch(partial(tree, times=7))(ONES)),
        "lowered": watch(jax.jit(square)).lower(ONES).as_text().count("multiply"),
    }
    carried = jax.tree_util.Partial(jnp.multiply, ONES)  # a function with an array in it
    moved = jax.tree_util.tree_map(lambda leaf: leaf + 1, watch(carried))
    return {**found, "pytree": bits(moved(ONES))}


def main() -> None:
    bare = ways(lambda function: function)
    outside = ways(partial(otel_train.jax.stage, name="loss"))
    session = otel_train.instrument(run_dir=sys.argv[1], console=False, prometheus=False)
    inside = ways(partial(otel_train.jax.stage, name="loss"))
    result = otel_train.jax.make_step(jax.jit(lambda x: jnp.linalg.matrix_power(x, 50)))(jnp.ones((300, 300)))
    ready = result.is_ready()
    scaled = bits(Scaled().scale(ONES))
    try:
        otel_train.instrument(object())
    except otel_train.ConfigError as error:
        refused = str(error)
    try:
        otel_train.jax.make_step(jax.jit(lambda x: 1 / 0))(ONES)
    except ZeroDivisionError as error:
        raised = str(error)
    session.close()
    assert session.run_directory is not None
    values = json.loads((session.run_directory / "rank0" / "summary.json").read_text())
    calls = Counter[str]()
    for row in values["stages"]:
        calls[row["stage"]] += row["count"] or 0
    sys.stdout.write(
        json.dumps(
            {
                "same outside": outside == bare, "same inside": inside == bare, "different": [
                    call for call in bare if inside[call] != bare[call]
                ], "calls": dict(calls), "ready": ready, "method": scaled == bits(ONES * 3.0),
                "documented": Scaled.scale.__doc__, "refused": refused, "raised": raised,
                "failed": sum(row["failed"] for row in values["stages"] if row["stage"] == "make_step"),
                "after close": bits(Scaled().scale(ONES)) == scaled,
                "torch": [name for name in sys.modules if name.partition(".")[0] == "torch"],
                "instrumentation_gaps": values["instrumentation_gaps"],
                "faults": values["telemetry"]["faults"],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
