"""Runs every kernel once, with sizes and alignments that cover its tails, for the sanitizers.

All memory is written by copies from the host: a tool limited to this package's kernels does not see
writes of torch's kernels, and would report the memory as uninitialized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import spectrain_ext as st

from .cases import Cases
from .scale import Scale

_SIZES = [1, 3, 8, 257, 2047, 2048, 2049, 20011]
_TYPES = [(d, d) for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
_TYPES += [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]


def small(cases: Cases, scale: Scale) -> None:
    """Run a case per pair of element types, then more rows than a launch's parameters hold."""
    torch.manual_seed(0)
    for wt, vt in _TYPES:
        for offset in (0, 1):
            name = f"{wt}, {vt}, {offset} elements off".replace("torch.", "")
            cases.run(name, lambda w=wt, v=vt, o=offset: _kernels(w, v, o, scale))  # type: ignore[misc]
    cases.run("900 rows", lambda: _many(scale))


def _kernels(wt: torch.dtype, vt: torch.dtype, offset: int, scale: Scale) -> None:
    def stream(dtype: torch.dtype, shift: int = offset) -> list[Tensor]:
        return [torch.randn(n + shift).abs_().to(dtype).to(scale.device)[shift:] for n in _SIZES]

    geometric = st.laws.Geometric(3)
    w, g, kept, out0, out1 = (stream(wt) for _ in range(5))
    v, u = stream(vt, 0), stream(vt, 0)
    plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=kept, outs=[out0, out1])
    plan.predict(lr=0.1, steps=2.0)
    plan.predict_(lr=0.1, steps=2.0)
    plan.stash_predict_(lr=0.1, steps=2.0)
    plan.swap_()
    plan.restore_()
    plan.extrapolate(steps=2.0)
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0, 0.0])
    plan.sgd_step_(lr=0.1, momentum=0.9, nesterov=True, smoothed=True, predict=[geometric])
    plan.sgd_step_(lr=0.1, momentum=0.0, weight_decay=0.1)
    _adam(w, v, u, g, [out0, out1])
    if wt in (torch.float16, torch.bfloat16) and vt == torch.float32:  # a float32 master weight
        master = stream(torch.float32)
        _adam(master, v, u, g, [out0, out1])
        mixed = st.Plan(master, momentum_buffers=v, grads=g, outs=[out0, out1])
        mixed.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0, 1.0])
        mixed.predict(lr=0.1, steps=2.0, out=1)
        mixed.write_out()
    scale.wait()


def _adam(w: list[Tensor], m: list[Tensor], u: list[Tensor], g: list[Tensor], outs: Any) -> None:
    """Run AdamW and NAdam with predictions by the linear law and by Adam's loop."""
    plan = st.Plan(w, exp_avgs=m, exp_avg_sqs=u, grads=g, outs=outs)
    adamw = {"lr": 1e-3, "weight_decay": 0.01, "step": 1, "decoupled_weight_decay": True}
    nadam = {"lr": 1e-3, "step": 2, "momentum_decay": 4e-3, "mu_product": 0.8}
    plan.adam_step_(**adamw, predict=[2.0, st.laws.Geometric(3)])
    plan.adam_step_(**nadam, predict=[2.0])
    plan.predict(**adamw, steps=2.0, out=1)
    plan.predict_(**adamw, steps=st.laws.Geometric(2))


def _many(scale: Scale) -> None:
    w, v = ([torch.randn(7).to(scale.device) for _ in range(900)] for _ in range(2))
    st.predict_(w, v, lr=0.1, steps=1.0)
    st.Plan(w, momentum_buffers=v).predict_(lr=0.1, steps=1.0)
    scale.wait()
