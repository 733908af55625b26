"""Stored images, 8 bits a value, into what models take, and their random variations."""

import torch
from torch import Tensor

# Mean and standard deviation of CIFAR-10's training images, a channel each, on the scale 0..1.
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_PADDING = 4


def normalize(images: Tensor) -> Tensor:
    """uint8 ``(batch, 3, rows, columns)`` to float32 of about zero mean and unit variance."""
    mean = torch.tensor(_MEAN, device=images.device).view(3, 1, 1)
    deviation = torch.tensor(_DEVIATION, device=images.device).view(3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(deviation)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift every image by up to 4 pixels each way, black coming in, and mirror every second one.

    Takes and returns uint8 ``(batch, 3, rows, columns)``; ``generator`` decides.
    """
    batch, _, rows, columns = images.shape
    padded = torch.nn.functional.pad(images, (_PADDING,) * 4)
    down, right = torch.randint(2 * _PADDING + 1, (2, batch, 1), generator=generator)
    mirrored = torch.rand(batch, 1, generator=generator) < 0.5
    row = down + torch.arange(rows)
    column = right + torch.arange(columns)
    column = torch.where(mirrored, column.flip(1), column)
    samples = torch.arange(batch).view(batch, 1, 1)
    # advanced indices around the channels' slice: its dimension comes last
    cut = padded[samples, :, row.unsqueeze(2), column.unsqueeze(1)]
    return cut.permute(0, 3, 1, 2).contiguous()
