"""Train a small character transformer on the text that comes with every Python.

Two sources are mixed: ``code`` (the standard library, read file by file) and ``prose`` (the language reference, held
in memory). Each read of ``code`` takes ANSWER_SECONDS longer, as from a network file system.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import otel_train

CHARACTERS = 128  # ASCII; everything else becomes "?"
CONTEXT = 64
BATCH = 16
VALIDATE_EVERY = 100
SHORTEST_FILE = 4096  # bytes
READS_PER_FILE = 8  # in one pass
ANSWER_SECONDS = 0.004  # per read, 64 ms per batch


class Transformer(nn.Module):
    """Predicts the next character from up to CONTEXT characters before it."""

    def __init__(self) -> None:
        super().__init__()
        width, heads, layers = 48, 4, 2
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.read_out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        """Returns the logits of the next character at every position of the text."""
        positions = torch.arange(text.shape[1], device=text.device)
        return self.read_out(self.blocks(self.characters(text) + self.positions(positions)))


class Block(nn.Module):
    """Attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mix = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input plus the outputs of attention and MLP."""
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.mix(self.before_mix(x))


class Files(Dataset[Tensor]):
    """Random windows from files, each read from a simulated slow disk."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [(path, path.stat().st_size) for path in paths]

    def __len__(self) -> int:
        return READS_PER_FILE * len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        path, size = self.files[index % len(self.files)]
        time.sleep(ANSWER_SECONDS)
        with path.open("rb") as file:
            file.seek(int(torch.randint(size - CONTEXT, ())))
            return encode(file.read(CONTEXT + 1))


class Windows(Dataset[Tensor]):
    """A text in memory, cut into windows."""

    def __init__(self, text: bytes) -> None:
        self.text = encode(text)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]


def encode(text: bytes) -> Tensor:
    """Returns the code points of ASCII characters; that of "?" for all others."""
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return numbers.where(numbers < CHARACTERS, ord("?"))


def make_loaders(workers: int) -> dict[str, DataLoader[Tensor]]:
    """Returns two training loaders, and one for validation with text that is in neither of them."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > SHORTEST_FILE]
    held_out, paths = paths[::10], [path for index, path in enumerate(paths) if index % 10]
    prose = "\n\n".join(topics.values()).encode("ascii", "replace")
    cut = len(prose) * 9 // 10
    unseen = prose[cut:] + b"".join(path.read_bytes() for path in held_out)
    return {
        "code": DataLoader(
            Files(paths), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        ),
        "prose": DataLoader(Windows(prose[:cut]), BATCH, shuffle=True),
        "val": DataLoader(Windows(unseen[: 10 * BATCH * CONTEXT + 1]), BATCH),
    }


def forever(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """Yields the batches of one pass after another."""
    while True:
        yield from loader


def loss_of(model: nn.Module, batch: Tensor, device: str) -> Tensor:
    """Returns the cross-entropy of the next characters, in nats."""
    batch = batch.to(device)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Tensor], device: str) -> float:
    """Returns the mean loss on the validation text."""
    model.eval()
    losses = [loss_of(model, batch, device) for batch in loader]
    model.train()
    return float(torch.stack(losses).mean())


def train(model: nn.Module, loaders: dict[str, DataLoader[Tensor]], options: argparse.Namespace) -> None:
    """Trains until the time is up or the steps are done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sources = [forever(loaders["code"]), forever(loaders["prose"])]
    start, seconds = time.monotonic(), options.minutes * 60
    planned = options.epochs * options.steps_per_epoch
    validate_every = options.steps_per_epoch if planned else VALIDATE_EVERY
    unit = "steps" if planned else "s"
    bar = tqdm(
        total=planned or round(seconds),
        bar_format=f"{{l_bar}}{{bar}}| {{n:.0f}}/{{total}} {unit}{{postfix}}",
        mininterval=0.1 if sys.stderr.isatty() else 10,  # a log keeps every redraw
    )
    shown = {"loss": "-", "val": "-"}
    with bar:
        for step in count(1):
            for source in sources:  # one update for a batch of each
                loss = loss_of(model, next(source), options.device)
                (loss / len(sources)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            if step % 10 == 0:
                shown["loss"] = f"{loss.item():.3f}"
            if step % validate_every == 0:
                shown["val"] = f"{validate(model, loaders['val'], options.device):.3f}"
                torch.save({"step": step, "model": model.state_dict()}, options.checkpoint)
            elapsed = time.monotonic() - start
            bar.set_postfix(step=step, **shown, refresh=False)
            bar.update(1 if planned else min(elapsed, bar.total) - bar.n)
            if step in (planned, options.steps) or (elapsed >= seconds and not planned):
                return


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description="Train a small character transformer on Python's own text.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--steps", type=int, default=0, help="stop after this many updates; 0: when the time is up"
    )
    parser.add_argument("--epochs", type=int, default=0, help="train so many, however long it takes")
    parser.add_argument("--steps-per-epoch", type=int, default=VALIDATE_EVERY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that read code ahead")
    parser.add_argument("--checkpoint", type=Path, default=Path("character_transformer.pt"))
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the model is too small for more, and other processes may need the cores
    model = Transformer().to(options.device)
    loaders = make_loaders(options.workers)
    otel_train.instrument(model, loaders)
    try:
        train(model, loaders, options)
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C.")


if __name__ == "__main__":
    main()
