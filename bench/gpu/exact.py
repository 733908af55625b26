"""Pipelines whose every element is computed alone: the same bits on CPUs and on GPUs.

A stage multiplies by a tensor of weights as large as its input, adds another one, and cuts off
what is negative: nothing is summed, and nothing rounds in another way elsewhere, as matrix products
and transcendental functions do. The loss is a sum, but its gradient is exact. Where a weight's last
bit differs from the CPU's, a stage has met another version or another message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spectrain_ext as st


class Elements(nn.Module):
    """One stage, for microbatches of this very shape."""

    def __init__(self, number: int, shape: tuple[int, int], last: bool) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(100 + number)
        self.scale = nn.Parameter(torch.randn(shape, generator=gen).mul_(0.1).add_(1))
        self.shift = nn.Parameter(torch.randn(shape, generator=gen).mul_(0.1))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale + self.shift
        return y if self.last else y.relu()


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Half a row's sum of squares, where rows are a power of two: no gradient is rounded."""
    d = output - target
    return (d * d).sum() / (2 * len(output))


def sgd(parameters: Iterable[nn.Parameter]) -> Any:
    return st.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Exact:
    """A run of such stages; rows and microbatches are powers of two."""

    method: str
    stages: int
    shape: tuple[int, int] = (4, 512)  # rows and columns of a microbatch
    microbatches: int = 1
    minibatches: int = 12

    def stage(self, k: int) -> nn.Module:
        """Stage k, on the CPU."""
        return Elements(k, self.shape, k == self.stages - 1)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same numbers each time."""
        gen = torch.Generator().manual_seed(5)
        rows, columns = self.shape
        for _ in range(self.minibatches):
            x, y = (torch.randn(rows * self.microbatches, columns, generator=gen) for _ in "xy")
            yield x, y

    def pipeline(self, devices: Sequence[str]) -> st.Pipeline:
        """In one process."""
        return st.Pipeline(
            [self.stage(k) for k in range(self.stages)],
            optimizer=sgd,
            loss_fn=squares,
            method=self.method,
            devices=list(devices),
            microbatches=self.microbatches,
        )

    def train(self, devices: Sequence[str]) -> dict[str, Tensor]:
        """The weights that one process ends with, on the CPU."""
        pipe = self.pipeline(devices)
        for _ in pipe.run(self.batches()):
            pass
        state = {k: v.detach().cpu().clone() for k, v in pipe.state_dict().items()}
        pipe.release()
        return state

    def on_cpu(self) -> dict[str, Tensor]:
        """What everything is compared with."""
        return self.train(["cpu"] * self.stages)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raises AssertionError where a bit differs, or nothing has been computed."""
    if found.keys() != expected.keys():
        raise AssertionError(f"expected {sorted(expected)}, got {sorted(found)}")
    wrong = [k for k in expected if not torch.equal(found[k], expected[k])]
    if wrong:
        worst = max(float((found[k].double() - expected[k].double()).abs().max()) for k in wrong)
        raise AssertionError(
            f"{len(wrong)} of {len(expected)} tensors differ, by up to {worst:.3g}: {wrong[:8]}"
        )
    # NaN differs from itself, so it is found above; zeros would agree whatever happened.
    if not all(bool(v.any()) for v in expected.values()):
        raise AssertionError("a tensor has zeros alone: nothing was compared")
