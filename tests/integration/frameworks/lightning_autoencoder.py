"""Lightning's README: an autoencoder whose ``training_step`` calls its parts. Random digits, two short epochs."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn, utils
from torch.nn import functional as F

from tests.integration.frameworks.watching import begin, end


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        # training_step defines the train loop. It is independent of forward
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    L.seed_everything(1, verbose=False)
    encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
    decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
    autoencoder = LitAutoEncoder(encoder, decoder)
    dataset = utils.data.TensorDataset(torch.rand(48, 1, 28, 28), torch.zeros(48))
    train, val = utils.data.random_split(dataset, [40, 8])
    train_loader, val_loader = (
        utils.data.DataLoader(train, batch_size=4),
        utils.data.DataLoader(val, batch_size=4),
    )
    begin({"autoencoder": autoencoder}, {"train": train_loader, "val": val_loader})
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(autoencoder, train_loader, val_loader)
    # Two batches of validation before the first epoch, to be sure that it works.
    end(autoencoder, steps=trainer.global_step, evals=2 + 2 * len(val_loader))


if __name__ == "__main__":
    main()
