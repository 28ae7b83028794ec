"""A program that wraps its step and its loader, and calls `instrument` nowhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import otel_train


@otel_train.jax.make_step
@jax.jit
def make_step(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)


def main() -> None:
    weights = jnp.zeros((16, 4))
    for batch in otel_train.watch([np.ones((8, 16), np.float32)] * 12, name="train"):
        weights = make_step(weights, batch)


if __name__ == "__main__":
    main()
