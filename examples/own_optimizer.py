"""Train with an optimizer of your own: Lion (arXiv 2302.06675).

python examples/own_optimizer.py

The package does not know its momentum, so the default method predicts from the last change of the
weights.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--epochs", type=int, default=3)
args = arguments.parse_args()


class Lion(torch.optim.Optimizer):
    """w <- (1 - lr*decay)*w - lr*sign(beta1*m + (1 - beta1)*g); m <- beta2*m + (1 - beta2)*g."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * torch.sign(torch.lerp(p.grad, m, beta1)))
                m.lerp_(p.grad, 1 - beta2)


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
stages = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(3)]
pipe = st.Pipeline(
    [*stages, nn.Linear(64, 10)],
    optimizer=lambda parameters: Lion(parameters, lr=3e-4, weight_decay=0.1),
    loss_fn=nn.functional.cross_entropy,
)
losses = pipe.fit(DataLoader(data, 48, shuffle=True), epochs=args.epochs, progress=True)
print("mean loss of each epoch:", *(f"{loss:.3f}" for loss in losses))
print("state of", len(pipe.optimizers[0].state), "parameters of stage 0 is Lion's own")
