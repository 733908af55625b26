"""Trace a library's ResNet-18, which is not an nn.Sequential, and train it in stages.

python examples/resnet18.py --stages 2 --width 64 --size 224
"""

import argparse

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--stages", type=int, default=2)
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--width", type=int, default=16)
arguments.add_argument("--size", type=int, default=32)
arguments.add_argument("--blocks", type=int, default=2, help="of each width; 2 in a ResNet-18")
args = arguments.parse_args()


class Logits(nn.Module):
    """Maps images to logits; torchvision's resnet18() needs no wrapper."""

    def __init__(self) -> None:
        super().__init__()
        widths = [args.width * 2**k for k in range(4)]
        self.resnet = ResNetForImageClassification(
            ResNetConfig(
                embedding_size=args.width,
                hidden_sizes=widths,
                depths=[args.blocks] * 4,
                layer_type="basic",
                num_labels=10,
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.resnet(images).logits


torch.manual_seed(0)
model = Logits()
parts = st.partition(model, args.stages, torch.randn(8, 3, args.size, args.size))
print(parts.cut)
pipe = st.Pipeline(
    parts,
    optimizer=lambda parameters: st.optim.SGD(parameters, lr=0.05, momentum=0.9),
    loss_fn=nn.functional.cross_entropy,
)
# Random images of ten colours; use your own DataLoader here.
colours = torch.randn(10, 3, 1, 1)
batches = []
for _ in range(args.steps):
    labels = torch.randint(10, (16,))
    batches.append((colours[labels] + 0.5 * torch.randn(16, 3, args.size, args.size), labels))
for result in pipe.run(batches):
    if result.index % 5 == 0:
        print(result.index, f"{result.loss.item():.3f}")
model.load_state_dict(pipe.state_dict())  # the names are those of the whole model
