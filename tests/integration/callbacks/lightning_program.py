"""A Trainer in several ways of use, each with the callbacks, or without otel_train. First argument: the package."""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.callbacks.telling import by_callback, folder, settings, tell, weights_hash

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE, CHOSEN = sys.argv[1], sys.argv[2].split(",")
L: Any = importlib.import_module(PACKAGE)


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(count)))


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(rows(4 * batches), batch_size=4)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.fails_at = -1

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, number: int) -> Any:
        if self.global_step == self.fails_at:
            raise ArithmeticError("a loss that is none")
        several = batch.values() if isinstance(batch, dict) else [batch]
        return self(sum(each[0] for each in several)).pow(2).mean()

    def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> None:
        self.log("val", self(batch[0]).mean(), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Manual(Module):
    """Two optimizers, one update each in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, number: int) -> None:
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(net(batch[0]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.net, self.other)]


def callbacks(name: str) -> list[Any]:
    from otel_train.integrations import lightning as ours

    return [
        ours.ThroughputMonitorCallback(enabled=True),
        ours.OtelTrainCallback(**settings(name)),
        ours.ProfilerCallback(enabled=False),
    ]


def by_hydra(name: str) -> list[Any]:
    """As a project has it that used the earlier callbacks, with another ``_target_``."""
    import hydra.utils
    from omegaconf import OmegaConf

    written = (Path(__file__).parent / "callbacks.yaml").read_text(encoding="utf-8")
    config = OmegaConf.create(written)
    config.profiler.output_dir = str(folder() / name / "traces")
    config.observer = {**config.observer, **settings(name)}
    return [hydra.utils.instantiate(each) for each in config.values()]


def fit(name: str, module: Any, train: Any, val: Any, **options: Any) -> Any:
    """Train; with what is printed on standard error put aside."""
    torch.manual_seed(0)
    made = callbacks if name != "hydra" else by_hydra
    said = io.StringIO()
    with redirect_stderr(said):
        trainer = L.Trainer(
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            callbacks=made(name) if by_callback() else None, default_root_dir=str(folder()),
            **{"enable_checkpointing": False, "max_epochs": 2, "logger": False, **options},
        )  # fmt: skip
        try:
            trainer.fit(module, train, val)
        except ArithmeticError:
            said.write("failed\n")
    return {"printed": said.getvalue(), "steps": trainer.global_step, "weights": weights_hash(module)}


def loggers() -> list[Any]:
    module = importlib.import_module(
        f"{L.__name__}.loggers" if hasattr(L, "loggers") else f"{PACKAGE}.pytorch.loggers"
    )
    return [
        module.MLFlowLogger("mine", tracking_uri=f"sqlite:///{folder()}/mlflow.db"),
        module.TensorBoardLogger(folder() / "tensorboard"),
    ]


def logged(name: str) -> Any:
    """Train, and read back what is in the run of the MLflow logger."""
    ours = loggers()
    said = fit(name, Module(), loader(10), None, logger=ours)
    client, run_id = ours[0].experiment, ours[0].run_id
    written = client.get_metric_history(run_id, "samples_per_second")
    return {
        **said,
        "at": [metric.step for metric in written],
        "keys": sorted(client.get_run(run_id).data.metrics),
    }


def failing() -> Module:
    module = Module()
    module.fails_at = 13
    return module


WAYS: dict[str, Callable[[str], Any]] = {
    "plain": lambda name: fit(name, Module(), loader(10), loader(4)),
    "accumulated": lambda name: fit(name, Module(), loader(9), None, accumulate_grad_batches=2),
    "several": lambda name: fit(
        name, Module(), {"code": loader(6), "prose": loader(6)}, [loader(2), loader(3)]
    ),
    "manual": lambda name: fit(name, Manual(), loader(5), None),
    "limited": lambda name: fit(name, Module(), loader(10), loader(4), limit_train_batches=4, max_epochs=3),
    "saved": lambda name: fit(name, Module(), loader(4), None, enable_checkpointing=True),
    "failing": lambda name: fit(name, failing(), loader(10), None),
    "logged": logged,
    "hydra": lambda name: fit(name, Module(), loader(30), loader(2), max_epochs=3),
    "ddp": lambda name: fit(name, Module(), loader(12), loader(4), strategy="ddp", devices=2),
}


def main() -> None:
    said = {}
    for name in CHOSEN:
        torch.manual_seed(0)
        (folder() / name).mkdir(parents=True, exist_ok=True)
        said[name] = WAYS[name](name)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    tell(said)


if __name__ == "__main__":
    main()
