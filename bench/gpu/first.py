"""Runs the smallest case of each kind against the CPU: an operator, a step and a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext import _C

from .cases import Cases
from .scale import Scale


def first(cases: Cases, scale: Scale) -> None:
    """Run the cases that everything else depends on."""
    cases.run("build", _C.build_info)
    cases.run("predict_", lambda: _predict(scale.device))
    cases.run("SGD step + 1 prediction", lambda: _sgd(scale.device))
    cases.run("AdamW step + 1 prediction", lambda: _adamw(scale.device))
    cases.run("a pipeline of two stages", lambda: _pipeline(scale.device))


def _lists(count: int, device: str) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    torch.manual_seed(0)
    host = [[torch.randn(n) for n in (1, 37, 4096, 10007)] for _ in range(count)]
    return host, [[t.clone().to(device) for t in each] for each in host]


def _compare(found: list[list[Tensor]], expected: list[list[Tensor]]) -> dict[str, Any]:
    for here, there in zip(found, expected, strict=True):
        for k, (a, b) in enumerate(zip(here, there, strict=True)):
            if not torch.equal(a.cpu(), b):
                worst = float((a.cpu() - b).abs().max())
                raise AssertionError(f"tensor {k} differs from the CPU's by up to {worst}")
    return {"bits": "the CPU's"}


def _predict(device: str) -> dict[str, Any]:
    host, there = _lists(2, device)
    for w, v in (host, there):
        st.predict_(w, v, lr=0.1, steps=3.0)
    return _compare(there, host)


def _sgd(device: str) -> dict[str, Any]:
    host, there = _lists(4, device)
    for w, g, v, out in (host, there):
        st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(2.0, out)])
    return _compare(there, host)


def _adamw(device: str) -> dict[str, Any]:
    host, there = _lists(5, device)
    for w, g, m, u, out in (host, there):
        u[:] = [t.abs() for t in u]
        st.adam_step_(
            w, g, m, u, lr=0.1, step=3, weight_decay=0.1, decoupled_weight_decay=True,
            predict=[(2.0, out)],
        )  # fmt: skip
    return _compare(there, host)


def _pipeline(device: str) -> dict[str, Any]:
    losses = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)]
        data = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(6)]
        pipe = st.Pipeline(
            [stage.double() for stage in stages],
            optimizer=lambda params: st.optim.SGD(params, lr=0.05, momentum=0.9),
            loss_fn=nn.functional.cross_entropy,
            devices=[place] * 2,
        )
        batches = [(x.double().to(place), y.to(place)) for x, y in data]
        losses.append(torch.stack([r.loss.detach().cpu() for r in pipe.run(batches)]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
    return {"losses": losses[1].tolist()}
