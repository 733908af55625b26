"""Defines pipelines with only elementwise operations: the same bits on CPUs and GPUs.

A stage multiplies its input elementwise by a weight tensor of the same size, adds another one, and
clips negative values. Nothing is summed, and nothing rounds differently elsewhere, as matrix
products and transcendental functions do. The loss is a sum, but its gradient is exact. If a
weight's last bit differs from the CPU's, a stage used another weight version or another message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spectrain_ext as st


class Elements(nn.Module):
    """One stage for microbatches of a fixed shape."""

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
    """Half the mean of the rows' sums of squares; 2^n rows leave every gradient exact."""
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
        """Return stage k on the CPU."""
        return Elements(k, self.shape, k == self.stages - 1)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the same batches every time."""
        gen = torch.Generator().manual_seed(5)
        rows, columns = self.shape
        for _ in range(self.minibatches):
            x, y = (torch.randn(rows * self.microbatches, columns, generator=gen) for _ in "xy")
            yield x, y

    def pipeline(self, devices: Sequence[str]) -> st.Pipeline:
        """Return an in-process pipeline."""
        return st.Pipeline(
            [self.stage(k) for k in range(self.stages)],
            optimizer=sgd,
            loss_fn=squares,
            method=self.method,
            devices=list(devices),
            microbatches=self.microbatches,
        )

    def train(self, devices: Sequence[str]) -> dict[str, Tensor]:
        """Train in one process; return the final weights on the CPU."""
        pipe = self.pipeline(devices)
        for _ in pipe.run(self.batches()):
            pass
        state = {k: v.detach().cpu().clone() for k, v in pipe.state_dict().items()}
        pipe.release()
        return state

    def on_cpu(self) -> dict[str, Tensor]:
        """Return the reference for all comparisons."""
        return self.train(["cpu"] * self.stages)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise AssertionError if a bit differs or nothing was computed."""
    if found.keys() != expected.keys():
        raise AssertionError(f"expected {sorted(expected)}, got {sorted(found)}")
    wrong = [k for k in expected if not torch.equal(found[k], expected[k])]
    if wrong:
        worst = max(float((found[k].double() - expected[k].double()).abs().max()) for k in wrong)
        raise AssertionError(
            f"{len(wrong)} of {len(expected)} tensors differ, by up to {worst:.3g}: {wrong[:8]}"
        )
    # NaN differs from itself, so the loop finds it; zeros would agree in any case.
    if not all(bool(v.any()) for v in expected.values()):
        raise AssertionError("a tensor has zeros alone: nothing was compared")
