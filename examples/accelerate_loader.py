"""Use Accelerate for loading, logging and saving; the pipeline makes the updates.

python examples/accelerate_loader.py --out runs/accelerate
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--epochs", type=int, default=3)
arguments.add_argument("--out", type=Path, default=Path("runs/accelerate"))
args = arguments.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
# Prepare the loader only: the pipeline owns the model.
loader = accelerator.prepare(DataLoader(data, 48, shuffle=True))

stages = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(3)]
pipe = st.Pipeline(
    [*stages, nn.Linear(64, 10)],
    optimizer=lambda parameters: st.optim.AdamW(parameters, lr=2e-3),
    loss_fn=nn.functional.cross_entropy,
    devices=[accelerator.device] * 4,
)
for epoch in range(args.epochs):
    (loss,) = pipe.fit(loader, progress=True)
    accelerator.print(f"epoch {epoch}: {loss:.3f}")
args.out.mkdir(parents=True, exist_ok=True)
accelerator.save(pipe.state_dict(), args.out / "model.safetensors", safe_serialization=True)
