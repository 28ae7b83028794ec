"""A loop whose batches keep changing shape, and one whose batches do not: prints the summary of it as JSON."""

from __future__ import annotations

import tests.integration.jax_programs.without_torch  # isort: skip  # noqa: F401 - before anything that would import it

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import otel_train


@otel_train.jax.make_step
@jax.jit
def make_step(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)


def main() -> None:
    run_dir, changing = sys.argv[1], sys.argv[2] == "changing"
    batches = [np.ones((n + 1 if changing else 8, 16), dtype=np.float32) for n in range(40)]
    session = otel_train.instrument(
        loaders={"train": batches, "val": batches[:3]}, run_dir=run_dir, console=False, prometheus=False
    )
    weights = jnp.zeros((16, 4))
    for batch in session.loaders["train"]:
        weights = make_step(weights, batch)
    score = otel_train.jax.stage(jax.jit(lambda w, x: (x @ w).mean()), "score")
    for batch in session.loaders["val"]:
        score(weights, batch)
    session.summary()  # accounts all events: then the step source is known
    refused = session.capture(steps=2)
    sys.stdout.write(json.dumps({**session.summary(), "capture refused": refused}))
    session.close()


if __name__ == "__main__":
    main()
