"""Loaders that a framework iterates have a name each, however often it makes them anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import otel_train
from tests.integration.loops.truth import QUIET, Net, dataset, loader, sgd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


Observed = Callable[..., dict[str, Any]]


@pytest.fixture
def observed(tmp_path: Path) -> Callable[[Any, Callable[[], object]], dict[str, Any]]:
    """Runs a program under a session that was given a model and no loader; what it says at the end."""

    def run(model: Any, program: Callable[[], object]) -> dict[str, Any]:
        with otel_train.instrument(model, run_dir=tmp_path / "runs", **QUIET) as session:
            program()
        summary = session.summary()
        assert summary["telemetry"]["faults"] == {}
        return summary

    return run


def data_rows(summary: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(r["loader"], r["phase"]): r["count"] for r in summary["stages"] if r["stage"] == "data"}


def test_each_loader_of_a_lightning_trainer_has_the_trainers_name(observed: Observed, tmp_path: Path) -> None:
    """Not one ``data_fetcher`` for training, validation, test and prediction; several say which they are."""
    lightning = pytest.importorskip("lightning.pytorch")
    seen: Counter[tuple[str, int]] = Counter()

    class Module(lightning.LightningModule):  # type: ignore[name-defined]  # no types here
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> Any:
            del number
            seen["train", 0] += 1
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def _look(self, stage: str, batch: Any, index: int) -> None:
            seen[stage, index] += 1
            self(batch[0])

        def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> None:
            del number
            self._look("val", batch, dataloader_idx)

        def test_step(self, batch: Any, number: int) -> None:
            """One of Lightning's hooks."""
            del number
            self._look("test", batch, 0)

        def predict_step(self, batch: Any, number: int) -> None:
            del number
            self._look("predict", batch, 0)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    class Data(lightning.LightningDataModule):  # type: ignore[name-defined]  # as above
        def train_dataloader(self) -> Any:
            return loader(6)

        def val_dataloader(self) -> Any:
            return [loader(2), loader(3)]

    module = Module()

    def program() -> None:
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, reload_dataloaders_every_n_epochs=1, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, datamodule=Data())
        for _ in range(2):
            trainer.test(module, loader(3), verbose=False)
            trainer.predict(module, loader(4))
        trainer.validate(module, [loader(1), loader(1)], verbose=False)

    summary = observed(module, program)

    expected = {
        ("train", "train"): seen["train", 0],
        ("val_0", "eval"): seen["val", 0],
        ("val_1", "eval"): seen["val", 1],
        ("test", "test"): seen["test", 0],
        ("predict", "predict"): seen["predict", 0],
    }
    assert data_rows(summary) == expected
    assert summary["batches"] == {name: count for (name, _), count in expected.items()}


def test_each_evaluation_of_a_transformers_trainer_is_a_pass_of_one_loader(
    observed: Observed, tmp_path: Path
) -> None:
    """The Trainer makes its loaders anew for every evaluation, and accelerate keeps them all."""
    transformers = pytest.importorskip("transformers")

    class Reviews(Dataset[Any]):
        def __init__(self, rows: int) -> None:
            self.tokens = torch.randint(0, 50, (rows, 6), generator=torch.Generator().manual_seed(rows))

        def __len__(self) -> int:
            return len(self.tokens)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": self.tokens[index], "labels": int(self.tokens[index].sum() % 2)}

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **shape))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), num_train_epochs=3, per_device_train_batch_size=4,
        per_device_eval_batch_size=8, eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Reviews(40), eval_dataset=Reviews(16)
    )

    def program() -> None:
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
        for _ in range(2):
            trainer.predict(Reviews(24))

    summary = observed(model, program)

    assert summary["batches"] == {"eval_dataloader": 10, "train_dataloader": 30, "test_dataloader": 6}
    endings = {row["loader"]: row["endings"] for row in summary["loaders"]}
    assert endings["eval_dataloader"] == {"epoch_end": 5}
    assert endings["test_dataloader"] == {"epoch_end": 2}


def test_loaders_that_accelerate_prepares_keep_the_names_of_the_program(observed: Observed) -> None:
    """It puts its own loader in the place of each, and never lets go of one."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer, train_loader = accelerator.prepare(net, sgd(net), loader(10))

    def evaluate(batches: Any) -> None:
        model.eval()
        with torch.no_grad():
            for x, _ in batches:
                model(x)
        model.train()

    def validate() -> None:
        val_loader = accelerator.prepare(loader(3))
        evaluate(val_loader)
        for part in [accelerator.prepare(loader(batches)) for batches in (1, 2)]:
            evaluate(part)

    def program() -> None:
        for _ in range(3):
            for x, y in train_loader:
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            validate()

    assert observed(net, program)["batches"] == {
        "train_loader": 30, "val_loader": 9, "part": 3, "part_2": 6
    }  # fmt: skip


def test_a_fastai_learner_has_train_and_valid_without_a_callback(observed: Observed) -> None:
    """Its own loader has torch iterate another that stands for it, under a name that says nothing."""
    learner = pytest.importorskip("fastai.learner")
    core, load = pytest.importorskip("fastai.data.core"), pytest.importorskip("fastai.data.load")
    net = Net()
    loaders = core.DataLoaders(load.DataLoader(dataset(5), bs=4), load.DataLoader(dataset(2), bs=4))
    learn = learner.Learner(loaders, net, loss_func=torch.nn.CrossEntropyLoss(), lr=0.01)

    def program() -> None:
        learn.fit(3)
        learn.validate()

    assert observed(net, program)["batches"] == {"train": 15, "valid": 8}


def test_loaders_of_a_fastai_learner_that_are_given_are_counted_once(tmp_path: Path) -> None:
    """Under the names that they were given, not under names of what torch iterates in their place as well."""
    learner = pytest.importorskip("fastai.learner")
    core, load = pytest.importorskip("fastai.data.core"), pytest.importorskip("fastai.data.load")
    net = Net()
    loaders = core.DataLoaders(
        load.DataLoader(dataset(5), bs=4, num_workers=1), load.DataLoader(dataset(2), bs=4)
    )
    learn = learner.Learner(loaders, net, loss_func=torch.nn.CrossEntropyLoss(), lr=0.01)
    given = {"mine": loaders.train, "held_out": loaders.valid}
    with otel_train.instrument(net, given, run_dir=tmp_path / "runs", **QUIET) as session:
        assert session.loaders == given
        learn.fit(3)
        assert session.last_loader_name == "held_out"

    summary = session.summary()
    assert summary["batches"] == {"mine": 15, "held_out": 6}
    assert {row["loader"]: row["workers"] for row in summary["loaders"]} == {"mine": 1, "held_out": 0}


def test_loaders_that_ignites_handlers_make_have_a_name_for_each_place(observed: Observed) -> None:
    """A handler that makes its loader runs once per epoch."""
    engine = pytest.importorskip("ignite.engine")
    net, kept = Net(), []
    trainer = engine.create_supervised_trainer(net, sgd(net), torch.nn.CrossEntropyLoss())
    evaluator = engine.create_supervised_evaluator(net)

    def validate() -> None:
        val_loader: DataLoader[Any] = loader(2)
        kept.append(val_loader)
        evaluator.run(val_loader)

    def test() -> None:
        test_loader: DataLoader[Any] = loader(3)
        kept.append(test_loader)
        evaluator.run(test_loader)

    trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, validate)
    trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, test)

    def program() -> None:
        train_loader = loader(4)
        trainer.run(train_loader, max_epochs=3)

    assert observed(net, program)["batches"] == {"train_loader": 12, "val_loader": 6, "test_loader": 9}
