"""A program with a session that does not use ``make_step``: bare, with a loader, or with its loss alone."""

from __future__ import annotations

import tests.integration.jax_programs.without_torch  # isort: skip  # noqa: F401 - before anything that would import it

import sys

import jax
import jax.numpy as jnp
import numpy as np

import otel_train


def loss_of(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ weights) ** 2)


def main() -> None:
    run_dir, kind = sys.argv[1:]
    batches = [np.ones((8, 16), np.float32)] * 12
    session = otel_train.instrument(
        loaders={"train": batches} if kind != "bare" else None,
        run_dir=run_dir,
        console=False,
        prometheus=False,
    )
    differentiate = jax.jit(jax.value_and_grad(loss_of))
    if kind == "loss":
        differentiate = otel_train.jax.stage(differentiate, "loss")
    weights = jnp.ones((16, 4))
    for batch in session.loaders.get("train", batches):
        _, gradients = differentiate(weights, batch)
        weights = jax.tree_util.tree_map(lambda w, g: w - 0.1 * g, weights, gradients)
    session.close()
    assert session.run_directory is not None
    sys.stdout.write((session.run_directory / "rank0" / "summary.json").read_text())


if __name__ == "__main__":
    main()
