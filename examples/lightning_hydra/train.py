"""Lightning, its callbacks listed in a Hydra config: traces of epochs 1 and 2, throughput of every epoch.

    pip install 'otel-train[lightning]' hydra-core
    python examples/lightning_hydra/train.py epochs=3

The traces are traces/epoch_1.json and traces/epoch_2.json, for chrome://tracing and Perfetto.
"""

import hydra
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch, _):
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@hydra.main(config_path=".", config_name="config", version_base="1.3")
def main(config):
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    rows = TensorDataset(torch.randn(960, 16), torch.randint(4, (960,)))
    trainer = lightning.Trainer(
        max_epochs=config.epochs,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(rows, batch_size=16))


if __name__ == "__main__":
    main()
