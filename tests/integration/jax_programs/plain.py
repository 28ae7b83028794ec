"""A JAX program that does not import otel_train: prints the weights, and what JAX made of its step."""

from __future__ import annotations

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def train_step(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ weights) - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradients, loss


@jax.jit
def evolve(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    candidates = weights + 0.01 * jnp.arange(-2.0, 3.0)[:, None]
    losses = jnp.mean((jnp.tanh(x @ candidates.T) - y[:, None]) ** 2, axis=0)
    return candidates[jnp.argmin(losses)], losses.min()


def main() -> None:
    step = evolve if "evolve" in sys.argv else train_step
    x, y = np.ones((32, 8), np.float32), np.ones(32, np.float32)
    weights = jnp.zeros(8)
    for _ in range(20):
        weights, loss = step(weights, x, y)
    made = step.lower(weights, x, y).as_text(debug_info=True)
    sys.stdout.write(
        f"{np.asarray(weights).tobytes().hex()} {loss} {hashlib.sha256(made.encode()).hexdigest()}\n"
    )
    sys.exit(3 if "fails" in sys.argv else 0)


if __name__ == "__main__":
    main()
