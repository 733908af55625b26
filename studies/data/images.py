"""Converts 8-bit images to model inputs and augments them."""

import torch
from torch import Tensor

# Mean and standard deviation of CIFAR-10's training images per channel, on the scale 0..1.
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_PADDING = 4


def normalize(images: Tensor) -> Tensor:
    """Convert uint8 ``(batch, 3, rows, columns)`` to float32 of about mean 0 and variance 1."""
    mean = torch.tensor(_MEAN, device=images.device).view(3, 1, 1)
    deviation = torch.tensor(_DEVIATION, device=images.device).view(3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(deviation)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift every image by up to 4 pixels each way, filling with black, and mirror half of them.

    Takes and returns uint8 ``(batch, 3, rows, columns)``; ``generator`` supplies the randomness.
    """
    batch, _, rows, columns = images.shape
    padded = torch.nn.functional.pad(images, (_PADDING,) * 4)
    down, right = torch.randint(2 * _PADDING + 1, (2, batch, 1), generator=generator)
    mirrored = torch.rand(batch, 1, generator=generator) < 0.5
    row = down + torch.arange(rows)
    column = right + torch.arange(columns)
    column = torch.where(mirrored, column.flip(1), column)
    samples = torch.arange(batch).view(batch, 1, 1)
    # advanced indices around a slice move its dimension to the end
    cut = padded[samples, :, row.unsqueeze(2), column.unsqueeze(1)]
    return cut.permute(0, 3, 1, 2).contiguous()
