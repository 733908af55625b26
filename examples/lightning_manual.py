"""Train a pipeline in a Lightning Trainer by manual optimization.

python examples/lightning_manual.py
"""

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--epochs", type=int, default=3)
args = arguments.parse_args()


class Pipelined(lightning.LightningModule):
    """Lightning provides loops, loggers and callbacks; the pipeline makes the updates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        stages = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
        self.pipe = st.Pipeline(
            [*stages, nn.Linear(64, 10)],
            optimizer=lambda parameters: st.optim.SGD(parameters, lr=0.05, momentum=0.9),
            loss_fn=nn.functional.cross_entropy,
        )

    def on_train_epoch_start(self) -> None:
        self.results = None

    def training_step(self, dataloader_iter):  # Lightning passes the iterator to this name
        if self.results is None:
            self.results = self.pipe.run(batch for batch, _, _ in dataloader_iter)
        result = next(self.results, None)  # several minibatches are in flight
        if result is not None:
            self.log("loss", result.loss, prog_bar=True, batch_size=48)

    def on_train_epoch_end(self) -> None:
        for _ in self.results:  # finish the minibatches in flight
            pass

    def configure_optimizers(self) -> None:
        return None


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
trainer = lightning.Trainer(max_epochs=args.epochs, accelerator="cpu", logger=False)
model = Pipelined()
trainer.fit(model, DataLoader(data, 48, shuffle=True))
print("last loss:", trainer.callback_metrics["loss"].item())
