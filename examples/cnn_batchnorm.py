"""Train a convolutional network with batch normalization on scikit-learn's digits.

python examples/cnn_batchnorm.py --stages 3 --devices cuda:0 cuda:1 cuda:2
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--stages", type=int, default=3)
arguments.add_argument("--epochs", type=int, default=3)
arguments.add_argument("--width", type=int, default=16)
arguments.add_argument("--devices", nargs="*", help="one per stage; none: the CPU")
args = arguments.parse_args()


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(
    torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
)
train, test = random_split(data, [0.8, 0.2])
width = args.width
model = nn.Sequential(
    convolution(1, width),
    convolution(width, width),
    nn.MaxPool2d(2),
    convolution(width, 2 * width),
    convolution(2 * width, 2 * width),
    nn.Flatten(),
    nn.Linear(2 * width * 16, 10),
)

parts = st.partition(model, args.stages, torch.randn(16, 1, 8, 8))
print(parts.cut)
# Batch normalization takes statistics from one microbatch: 48 samples / 3 stages = 16.
pipe = st.Pipeline(
    parts,
    optimizer=lambda parameters: st.optim.SGD(parameters, lr=0.02, momentum=0.9),
    loss_fn=nn.functional.cross_entropy,
    devices=args.devices,
)
loader = DataLoader(train, 48, shuffle=True, drop_last=True)
losses = pipe.fit(loader, epochs=args.epochs, progress=True)
print("mean loss of each epoch:", *(f"{loss:.3f}" for loss in losses))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


print(pipe.evaluate(DataLoader(test, 64), {"accuracy": accuracy}))
