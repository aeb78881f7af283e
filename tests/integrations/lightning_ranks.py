"""Two processes of Lightning's own, each of which writes what it ended with; started by `test_lightning.py`."""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import strucspars as ss
from strucspars.integrations.lightning import SparsifyCallback


class Classifier(LightningModule):
    """Initialised differently on every rank: Lightning gives all of them the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 4),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Classify."""
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(folder: Path) -> None:
    """Fit, convert, write."""
    config = ss.SparsifyConfig(target=0.4, epochs=3, controller="paper", lambda_step=1e-2, lambda_warmup=0)
    callback = SparsifyCallback(config, convert=True)
    images = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(images, torch.arange(32) % 4), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        callbacks=[callback],
        **quiet,  # type: ignore[arg-type]  # one dict for options of several types
    )
    module = Classifier()
    trainer.fit(module, data)
    outcome = {
        "plan": callback.plan.to_json(),
        "lambda": callback.sparsifier.lambda_value,
        "state": module.state_dict(),
    }
    torch.save(outcome, folder / f"{trainer.global_rank}.pt")
    trainer.strategy.barrier()
    # Now and then torch's background threads abort the process while the interpreter shuts down; the work is done.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
