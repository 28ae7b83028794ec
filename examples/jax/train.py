"""An Equinox classifier trained with optax, observed: two lines of it are about otel_train.

pip install 'otel-train[jax]' equinox optax
python examples/jax/train.py --epochs 3
"""

from __future__ import annotations

import argparse
import hashlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import otel_train

BATCH = 64


class Spirals:
    """Points on two spirals, in batches; the same in every run."""

    def __init__(self, points: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        angle = rng.uniform(0.5, 3.5, points) * np.pi
        side = rng.integers(0, 2, points)
        x = np.stack([angle * np.cos(angle + np.pi * side), angle * np.sin(angle + np.pi * side)], axis=1)
        self.x = (x / 10 + rng.normal(0, 0.02, x.shape)).astype(np.float32)
        self.y = side.astype(np.int32)

    def __len__(self) -> int:
        return len(self.y) // BATCH  # the short last batch is left out: its shape would be compiled anew

    def __iter__(self):
        for first in range(0, len(self) * BATCH, BATCH):
            part = slice(first, first + BATCH)
            yield self.x[part], self.y[part]


def loss_of(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


def main() -> None:
    """Trains, evaluates after each epoch, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over 4,096 points (3)")
    epochs = parser.parse_args().epochs

    model = eqx.nn.MLP(2, 2, 64, 2, key=jax.random.PRNGKey(0))
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @otel_train.jax.make_step  # around what is compiled: a call of it is a step
    @eqx.filter_jit(donate="all-except-first")
    def make_step(batch, model, state):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, *batch)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    @eqx.filter_jit
    def correct(model, x, y):
        return (jax.vmap(model)(x).argmax(axis=1) == y).sum()

    correct = otel_train.jax.stage(correct, "evaluate")
    session = otel_train.instrument(loaders={"train": Spirals(4096, 0), "val": Spirals(512, 1)})
    steps = 0
    for epoch in range(1, epochs + 1):
        for batch in session.loaders["train"]:
            model, state, loss = make_step(batch, model, state)
            otel_train.log(loss=loss)
            steps += 1
        right = sum(int(correct(model, jnp.asarray(x), y)) for x, y in session.loaders["val"])
        print(f"epoch {epoch}: loss {float(loss):.4f}, {right} of 512 right")
    weights = b"".join(
        np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(eqx.filter(model, eqx.is_array))
    )
    print(f"{steps} steps, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
