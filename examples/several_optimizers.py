"""Several optimizers for one stage: Adafactor for matrices, AdamW for the rest.

python examples/several_optimizers.py
"""

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--epochs", type=int, default=5)
args = arguments.parse_args()


class Together(torch.optim.Optimizer):
    """One optimizer with the groups and the state of several: schedulers and checkpoints see it."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.share()

    def share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __setstate__(self, state: dict) -> None:  # load_state_dict ends here
        super().__setstate__(state)
        self.share()

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()


def adafactor_and_adamw(parameters: list[nn.Parameter]) -> Together:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    parts = [(torch.optim.Adafactor, matrices, 0.02), (torch.optim.AdamW, others, 1e-3)]
    return Together(*(kind(params, lr=lr) for kind, params, lr in parts if params))


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
stages = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(3)]
pipe = st.Pipeline(
    [*stages, nn.Linear(64, 10)],
    adafactor_and_adamw,
    nn.functional.cross_entropy,
    method=st.spectrain(law="difference"),
)
losses = pipe.fit(DataLoader(data, 48, shuffle=True), args.epochs, progress=True)
for epoch, loss in enumerate(losses):
    print(f"epoch {epoch}: {loss:.3f}")
