"""Study your own model and data: a function that returns a ``studies.Workload``.

From the root of the repository:

    python -m studies study --workload examples.own_workload:digits_mlp --stages 2,4 --seeds 3
    python -m studies train --workload examples.own_workload:digits_mlp --stages 4 --width 64
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st
from studies import Workload


def digits_mlp(seed: int, lr: float = 0.05, width: int = 32, batch_size: int = 32) -> Workload:
    """Return the workload of one run; command-line options set parameters by name."""
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target, dtype=torch.int64)
    shuffled = DataLoader(
        TensorDataset(inputs[:1500], targets[:1500]),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),  # the same order under every method
    )
    hidden = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(4)
    ]
    return Workload(
        name="digits",
        model=[nn.Linear(64, width), *hidden, nn.Linear(width, 10)],  # cut between layers
        optimizer=lambda parameters: st.optim.SGD(parameters, lr=lr, momentum=0.9),
        loss=nn.functional.cross_entropy,
        train=shuffled,
        test=[(inputs[1500:], targets[1500:])],
    )
