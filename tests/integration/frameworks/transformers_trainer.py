"""transformers' guide to fine-tuning with ``Trainer``: a tiny BERT from its configuration, synthetic sentences."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from tests.integration.frameworks.watching import begin, end


class Reviews(torch.utils.data.Dataset):
    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 100, (rows, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        row = self.tokens[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row.sum() % 2)}


def main() -> None:
    set_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    begin({"bert": model})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Reviews(40), eval_dataset=Reviews(16))
        trainer.train()
    end(model, steps=trainer.state.global_step, evals=2 * 2)


if __name__ == "__main__":
    main()
