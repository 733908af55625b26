"""Tests every operator with every combination of dtypes: refused, or right to the bit.

And the statistics of stochastic rounding, whose bits are in test_calls.py.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import ops_reference as ref
from helpers.bad_input import raises
from helpers.ops_calls import PRODUCTS
from helpers.ops_tensors import World
from torch import Tensor

import spectrain_ext as st

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_WORLD = {
    "way": "one tensor", "dtypes": "float32", "layout": "apart", "sizes": "nine",
    "values": "normal", "threads": 1,
}  # fmt: skip
_STEP = {
    **_WORLD, "rule": "SGD", "lr": "ordinary", "predictions": "none", "decay": "no", "first": "no",
    "maximize": False, "missing": "no", "gate": "none", "zero_grad": False, "seed": None,
}  # fmt: skip
_PREDICTION = {
    **_WORLD, "call": "predict", "rule": "SGD", "lr": "ordinary", "law": "linear", "decay": "no",
    "numbers": "all", "output": "given",
}  # fmt: skip
_COPY = {**_WORLD, "call": "stash", "output": "given", "steps": 2.5}
_PLANNED = {**_STEP, "way": "plan of one tensor"}
_SGD, _ADAM = "params grads momentum", "params grads momentum second"
#: A kind of call and its options, the lists whose dtypes vary, and how many combinations it takes.
_CALLS: list[tuple[str, dict[str, Any], str, int]] = [
    ("prediction", {**_PREDICTION, "call": "predict_"}, "params momentum", 7),
    ("prediction", _PREDICTION, "params momentum out0", 10),
    ("prediction", {**_PREDICTION, "law": "no step"}, "params momentum out0", 11),
    ("prediction", {**_PREDICTION, "call": "stash_predict_"}, "params stashed momentum", 7),
    ("prediction", {**_PREDICTION, "rule": "Adam"}, "params momentum second out0", 10),
    ("prediction", {**_PREDICTION, "rule": "Lion"}, "params momentum out0", 10),
    ("copy", _COPY, "params stashed", 4),
    ("copy", {**_COPY, "call": "restore_"}, "params stashed", 4),
    ("copy", {**_COPY, "call": "swap_"}, "params stashed", 4),
    ("copy", {**_COPY, "call": "extrapolate"}, "params stashed out0", 4),
    ("copy", {**_COPY, "call": "extrapolate", "steps": 0}, "params stashed out0", 6),
    ("copy", {**_COPY, "call": "distance"}, "params stashed", 4),
    ("copy", {**_COPY, "call": "write_out", "way": "plan of one tensor"}, "params out0", 6),
    ("step", {**_STEP, "predictions": "second order"}, f"{_SGD} out0 out1", 34),
    ("step", {**_STEP, "rule": "SGD without momentum"}, "params grads", 6),
    ("step", {**_STEP, "zero_grad": True, "gate": "scale and clip"}, _SGD, 10),
    ("step", {**_STEP, "seed": 1, "predictions": "linear"}, f"{_SGD} out0", 2),
    ("step", {**_STEP, "rule": "Adam", "predictions": "linear"}, f"{_ADAM} out0", 16),
    ("step", {**_STEP, "rule": "Lion", "predictions": "linear"}, f"{_SGD} out0", 16),
    ("step", {**_PLANNED, "predictions": "linear"}, f"{_SGD} out0 stashed", 16),
]


@pytest.mark.parametrize(("kind", "options", "names", "taken"), _CALLS)
def test_a_call_is_refused_or_right(
    kind: str, options: dict[str, Any], names: str, taken: int
) -> None:
    """Guard bytes around each tensor show a kernel that takes it for one of a wider type."""
    torch.set_num_threads(1)
    found = 0
    for dtypes in itertools.product((F16, BF16, F32, F64), repeat=len(names.split())):
        chosen = dict(zip(names.split(), dtypes, strict=True))
        # What a plan has besides must fit.
        rest = dict.fromkeys(("grads", "momentum", "second", "stashed", "out0", "out1"), dtypes[0])
        world = World(options, 1, dtypes={**rest, **chosen})
        before = {name: made.buffer.clone() for name, made in world.lists.items()}
        try:
            PRODUCTS[kind][0](world, options)
        except ValueError:
            for name, made in world.lists.items():
                if name != "grads":  # made anew before the call
                    assert torch.equal(made.buffer, before[name]), f"{dtypes}: it wrote {name}"
        else:
            found += 1
    assert found == taken


def test_a_refusal_names_the_lists_and_types() -> None:
    """A kernel writes both moments with one type: a narrower one's memory would end earlier."""
    w, m, u = lists = [[torch.ones(4, dtype=BF16) for _ in range(3)] for _ in range(3)]
    u[2] = u[2].float()
    says = ["expected bfloat16", "the dtype of exp_avgs[2]", "got float32"]
    plan = partial(st.Plan, w, exp_avgs=m, exp_avg_sqs=u)
    raises(ValueError, r"^exp_avg_sqs\[2\]:", plan, lists, *says)
    w, g, v, out = lists = [[torch.rand(5), torch.rand(5)] for _ in range(4)]
    g[1], out[1] = g[1].bfloat16(), out[1].half()
    step = partial(st.sgd_step_, w, g, v, lr=0.1, momentum=0.9, predict=[(1.0, out)])
    raises(ValueError, r"params\[1\]", step, lists, "bfloat16", "float16")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_number_and_every_rounding(dtype: torch.dtype, device: str) -> None:
    """All bits are copied; halfway cases go to even; overflow and subnormals are IEEE's."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    kept = st.stash(every.to(device))
    ref.assert_bits(kept.cpu(), every, "stash")
    exact = every.float()
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[1:].double() + exact[:-1].double()).div(2).float()
    up = torch.nextafter(halfway, torch.tensor(torch.inf))
    down = torch.nextafter(halfway, torch.tensor(-torch.inf))
    large = torch.tensor([65519.0, 65520.0, 65535.0, 3e38, -3e38, 1e-45, -1e-45])
    w = torch.cat([exact, halfway, up, down, large, -large])
    out = torch.empty(len(w), dtype=dtype, device=device)
    st.Plan(w.to(device), outs=[out]).write_out()
    ref.assert_same(out.cpu(), w.to(dtype), "out")


def _step(w: Tensor, g: Tensor, seed: int) -> None:
    st.sgd_step_(w, g, None, lr=1.0, momentum=0.0, rounding_seed=seed)


@pytest.mark.parametrize("fraction", [0.0625, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_probability_is_the_distance(fraction: float, sign: float) -> None:
    """Of n elements at `fraction` of the interval, k round up: within 5 deviations."""
    n, ulp = 1 << 18, 2.0**-7
    gradient = torch.full((n,), -sign * fraction * ulp).bfloat16()
    share = (gradient[0].double().abs() / ulp).item()
    shares = []
    for seed in range(4):
        w = torch.full((n,), sign, dtype=torch.bfloat16)
        _step(w, gradient, seed)
        moved = w != sign
        assert (w[moved] == sign * (1 + ulp)).all()
        shares.append(moved.double().mean().item())
    deviation = (share * (1 - share) / n) ** 0.5
    assert all(abs(s - share) < 5 * deviation for s in shares)
    assert abs(sum(shares) / 4 - share) < 5 * deviation / 2


def test_a_second_moment_does_not_stand_still() -> None:
    """A step adds 0.1 % of the distance; to nearest, nothing would move beyond 0.8 of it."""
    n, steps = 4096, 3000
    w, g, m, u = (torch.full((n,), x) for x in (0.0, 1.0, 0.0, 0.0))
    m, u = m.bfloat16(), u.bfloat16()
    plan = st.Plan(w, grads=g, exp_avgs=m, exp_avg_sqs=u)
    for step in range(1, steps + 1):
        plan.adam_step_(lr=1e-3, step=step)
    share = u.double().mean().item() / (1 - 0.999**steps)
    assert abs(share - 1) < 2e-3
    assert u.double().std().item() < 0.1


def test_seeds_decide_independently() -> None:
    n = 1 << 16
    decisions = []
    for seed in (0, 1, 2**32, 2**63):
        w = torch.ones(n, dtype=torch.bfloat16)
        _step(w, torch.full_like(w, -(2.0**-8)), seed)
        decisions.append((w > 1).double())
    table = torch.corrcoef(torch.stack(decisions)) - torch.eye(4)
    assert table.abs().max() < 5 / n**0.5
    neighbours = torch.corrcoef(torch.stack([decisions[0][1:], decisions[0][:-1]]))
    assert abs(neighbours[0, 1]) < 5 / n**0.5
