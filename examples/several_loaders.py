"""Two loaders, drawn from by weight until both have run out, with an evaluation in between.

    python examples/several_loaders.py

Every loader has its own times, under the name that is given here: in the run summary at the end, in Prometheus, and as
profile/train/dl_code/time_data_ms and so on in W&B, MLflow or TensorBoard, whichever the program has open.
"""

import random

import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train


def rows(count):
    return TensorDataset(torch.randn(count, 16), torch.randint(4, (count,)))


def main():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = torch.nn.CrossEntropyLoss()
    train = {"code": DataLoader(rows(960), batch_size=16), "prose": DataLoader(rows(320), batch_size=16)}
    val = DataLoader(rows(160), batch_size=16)

    session = otel_train.instrument(model, {**train, "val": val}, console_metrics=["profiling"])
    slow = []  # filled by a callback before every forward

    def note_slow_batches():
        if (session.last_batch_fetch_ms or 0) > 50:
            slow.append(session.last_loader_name)

    session.on("forward", before=note_slow_batches)

    weights = {"code": 0.7, "prose": 0.3}
    live = {name: iter(loader) for name, loader in train.items()}
    steps = 0
    while live:
        (name,) = random.choices(list(live), [weights[name] for name in live])
        batch = next(live[name], None)
        if batch is None:
            del live[name]  # one runs out before the other
            continue
        inputs, labels = batch
        loss_of(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 40 == 0:
            evaluate(model, val)
    print("batches that took more than 50 ms to come:", slow)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(inputs).argmax(1) == labels).sum() for inputs, labels in loader)
    otel_train.log(accuracy=right / len(loader.dataset))
    model.train()


if __name__ == "__main__":
    main()
