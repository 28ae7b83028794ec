"""The Trainer of transformers over a tiny BERT, with accumulation, evaluation and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from tests.integration.callbacks.telling import by_callback, folder, settings, tell, weights_hash


class Reviews(Dataset[Any]):
    def __init__(self, rows: int) -> None:
        self.tokens = torch.randint(0, 50, (rows, 6), generator=torch.Generator().manual_seed(rows))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": int(self.tokens[index].sum() % 2)}


def callbacks() -> list[Any]:
    if not by_callback():
        return []
    from otel_train.integrations.transformers import OtelTrainCallback

    return [OtelTrainCallback(console_metrics=["throughput"], **settings("run"))]


def main() -> None:
    set_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **shape))
    arguments = TrainingArguments(
        output_dir=str(folder() / "out"), num_train_epochs=2, per_device_train_batch_size=4,
        per_device_eval_batch_size=8, gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="epoch",
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Reviews(40),
        eval_dataset=Reviews(16),
        callbacks=callbacks(),
    )
    trainer.train()
    tell({"steps": trainer.state.global_step, "evals": 4, "checkpoints": 2, "weights": weights_hash(model)})


if __name__ == "__main__":
    main()
