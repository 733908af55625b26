"""Train a method of your own next to those of the package.

python examples/own_method.py

Studies accept it too: python -m studies train --method sync,spectrain,own_method:cautious
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import spectrain_ext as st

# Predict over half of the delay, and reuse those weights in the backward.
cautious = st.Method(
    "cautious",
    "predicts half of the delay, in zero-gradient updates, and keeps that for the backward",
    law="geometric",
    forward_horizon=lambda place: (place.stages - place.stage) // 2,
    backward="stash",
)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def train(method: str | st.Method, epochs: int) -> tuple[float, float]:
    """Return the last epoch's mean loss and the test accuracy."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = random_split(data, [0.8, 0.2])
    blocks = [Residual(64) for _ in range(5)]
    pipe = st.Pipeline(
        [*blocks, nn.Linear(64, 10)],
        optimizer=lambda parameters: st.optim.SGD(parameters, lr=0.01, momentum=0.9),
        loss_fn=nn.functional.cross_entropy,
        method=method,
    )
    *_, loss = pipe.fit(DataLoader(train, 24, shuffle=True), epochs=epochs, progress=True)
    scores = pipe.evaluate(DataLoader(test, 64), {"accuracy": accuracy})
    return loss, scores["accuracy"]


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=4)
    args = arguments.parse_args()
    for method in ("1f1b", "pipedream", "spectrain", cautious):
        loss, score = train(method, args.epochs)
        print(f"{getattr(method, 'name', method):10} loss {loss:.3f}, {100 * score:.1f} %")
