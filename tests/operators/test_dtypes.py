"""Tests every operator with every combination of dtypes: rejected, or correct and in bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bad_input import raises
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.numbers import Adam

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COUNT = 9  # elements of an array
# bytes before and after an array, which a kernel could mistake for a wider one
_STRIDE = 2 * 8 * _COUNT
_ROOM = [2 * _STRIDE * k + _STRIDE for k in range(8)]  # offsets of arrays
_VALUES = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1.5, (len(_ROOM), _COUNT)))
#: Allowed deviation of a type from float64, doubled: for rounding and for computing.
_ROUNDING = {t: 8 * torch.finfo(t).eps for t in DTYPES}


@dataclass(frozen=True)
class Op:
    """A call's arguments, the ones it writes, and the number of accepted combinations."""

    given: str
    written: str
    taken: int
    call: Callable[[Mapping[str, Tensor]], object]

    def arrays(self, memory: Tensor, dtypes: tuple[torch.dtype, ...]) -> dict[str, Tensor]:
        """Return its arguments in one byte buffer, with sufficient distance."""
        arrays = {
            name: memory[at : at + _COUNT * dtype.itemsize].view(dtype)
            for name, at, dtype in zip(self.given.split(), _ROOM, dtypes, strict=False)
        }
        for values, array in zip(_VALUES, arrays.values(), strict=False):
            array.copy_(values)
        return arrays


_HORIZON: dict[str, Any] = {"lr": 0.1, "steps": 2.0}
_ADAM: dict[str, Any] = {"lr": 0.1, "step": 3}
_SCALARS = ("grad_scale", "clip_factor")
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def _plan_of_adam(a: Mapping[str, Tensor]) -> None:
    state = {"exp_avgs": a["m"], "exp_avg_sqs": a["u"], "stashed": a["kept"]}
    plan = st.Plan(a["w"], outs=[a["out"], a["more"]], **state)
    plan.stash_predict_([Adam(0.1, step=3)], steps=2.0)
    plan.predict([Adam(0.1, step=3)], steps=1.0)
    plan.swap_()
    plan.write_out(out=1)


def _plan_of_sgd(a: Mapping[str, Tensor]) -> None:
    plan = st.Plan(
        a["w"], momentum_buffers=a["v"], grads=a["g"], stashed=a["kept"], outs=[a["out"]]
    )
    plan.sgd_step_(**_SGD, predict=[2.0])
    plan.swap_()
    plan.restore_()


def _step_that_rounds(a: Mapping[str, Tensor]) -> None:
    seed = None if a["w"].dtype == torch.float64 else 1
    st.sgd_step_(a["w"], a["g"], a["v"], predict=[(2.0, a["out"])], rounding_seed=seed, **_SGD)


def _step_that_waits(a: Mapping[str, Tensor]) -> None:
    scale, factor = a["grad_scale"][:1], a["clip_factor"][:1]
    st.sgd_step_(a["w"], a["g"], a["v"], grad_scale=scale, clip_factor=factor, **_SGD)


OPS = {
    "predict_": Op("w v", "w", 6, lambda a: st.predict_(a["w"], a["v"], **_HORIZON)),
    "predict": Op(
        "w v out", "out", 8, lambda a: st.predict(a["w"], a["v"], out=a["out"], **_HORIZON)
    ),
    "predict of no step": Op(
        "w v out", "out", 8, lambda a: st.predict(a["w"], a["v"], out=a["out"], lr=0.1, steps=0.0)
    ),
    "stash": Op("w out", "out", 4, lambda a: st.stash(a["w"], a["out"])),
    "restore_": Op("w kept", "w", 4, lambda a: st.restore_(a["w"], a["kept"])),
    "swap_": Op("w kept", "w kept", 4, lambda a: st.swap_(a["w"], a["kept"])),
    "stash_predict_": Op(
        "w kept v", "w kept", 6, lambda a: st.stash_predict_(a["w"], a["kept"], a["v"], **_HORIZON)
    ),
    "sgd_step_": Op(
        "w g v out more",
        "w v out more",
        26,
        lambda a: st.sgd_step_(
            a["w"], a["g"], a["v"], predict=[(2.0, a["out"]), (1.0, a["more"])], **_SGD
        ),
    ),
    "sgd_step_ without momentum": Op(
        "w g v", "w", 8, lambda a: st.sgd_step_(a["w"], a["g"], a["v"], lr=0.1, momentum=0.0)
    ),
    "sgd_step_ that sets gradients to zero": Op(
        "w g v", "w g v", 8, lambda a: st.sgd_step_(a["w"], a["g"], a["v"], zero_grad=True, **_SGD)
    ),
    "sgd_step_ that rounds": Op("w g v out", "w v out", 3, _step_that_rounds),
    "sgd_step_ that waits": Op("w g v grad_scale clip_factor", "w v", 8, _step_that_waits),
    "adam_step_": Op(
        "w g m u out",
        "w m u out",
        12,
        lambda a: st.adam_step_(a["w"], a["g"], a["m"], a["u"], predict=[(2.0, a["out"])], **_ADAM),
    ),
    "adam_predict": Op(
        "w m u out",
        "out",
        8,
        lambda a: st.adam_predict(a["w"], a["m"], a["u"], out=a["out"], steps=2.0, **_ADAM),
    ),
    "extrapolate": Op(
        "w kept out", "out", 4, lambda a: st.extrapolate(a["w"], a["kept"], out=a["out"], steps=2.0)
    ),
    "extrapolate by no step": Op(
        "w kept out", "out", 6, lambda a: st.extrapolate(a["w"], a["kept"], out=a["out"], steps=0.0)
    ),
    "distance": Op("w kept out", "", 4, lambda a: st.distance(a["w"], [a["kept"], a["out"]])),
    "Plan of SGD": Op("w v g kept out", "w v kept out", 12, _plan_of_sgd),
    "Plan of Adam": Op("w m u kept out more", "w kept out more", 14, _plan_of_adam),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_call_is_refused_or_right_and_writes_inside_its_arrays(op: Op) -> None:
    names, written = op.given.split(), op.written.split()
    memory = torch.empty(2 * _STRIDE * len(_ROOM), dtype=torch.uint8)
    exact = op.arrays(
        torch.empty_like(memory),
        tuple(torch.float32 if name in _SCALARS else torch.float64 for name in names),
    )
    op.call(exact)
    taken = 0
    for dtypes in itertools.product(DTYPES, repeat=len(names)):
        memory.fill_(0xA5)
        arrays = op.arrays(memory, dtypes)
        before = memory.clone()
        try:
            op.call(arrays)
        except ValueError:
            assert torch.equal(memory, before), f"{dtypes}: it refused, and wrote"
            continue
        taken += 1
        rounding = max(_ROUNDING[dtype] for dtype in dtypes)
        for name in written:
            torch.testing.assert_close(
                arrays[name].double(), exact[name], rtol=rounding, atol=rounding, msg=f"{dtypes}"
            )
            arrays[name].copy_(_VALUES[names.index(name)])
        assert torch.equal(memory, before), f"{dtypes}: it wrote beside what it writes"
    assert taken == op.taken


_MOMENTS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("moments", _MOMENTS, ids=str)
@pytest.mark.parametrize("name", ["adam_step_", "adam_predict", "Plan"])
def test_the_state_of_a_parameter_has_one_dtype(
    name: str, moments: tuple[torch.dtype, torch.dtype]
) -> None:
    """A kernel writes both states with one dtype: a narrower one's memory would end earlier."""
    one, other = moments
    w = [torch.ones(4, dtype=torch.bfloat16) for _ in range(3)]
    g, out = [t.clone() for t in w], [t.clone() for t in w]
    m = [torch.zeros(4, dtype=one) for _ in w]
    u = [torch.zeros(4, dtype=one), torch.zeros(4, dtype=one), torch.zeros(4, dtype=other)]
    calls: dict[str, Callable[[], object]] = {
        "adam_step_": lambda: st.adam_step_(w, g, m, u, **_ADAM),
        "adam_predict": lambda: st.adam_predict(w, m, u, out=out, steps=1.0, **_ADAM),
        "Plan": lambda: st.Plan(w, exp_avgs=m, exp_avg_sqs=u),
    }
    says = [f"expected {str(one)[6:]}", "the dtype of exp_avgs[2]", f"got {str(other)[6:]}"]
    raises(ValueError, r"^exp_avg_sqs\[2\]:", calls[name], (w, g, m, u, out), *says)
