"""Tests SOAP's step in float64, its options and state; `test_muon` has the shared tests."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.optim_cases import (
    BF16,
    F32,
    F64,
    assert_bits,
    bits,
    give_gradients,
    make_matrices,
    refuses,
    twins,
)
from torch import Tensor, nn

import spectrain_ext as st


class Oracle:
    """The steps of a matrix as in the paper's public code, in float64."""

    def __init__(self, weight: Tensor, known: tuple[Tensor, Tensor], **options: Any) -> None:
        defaults = {"lr": 3e-3, "betas": (0.95, 0.95), "shampoo_beta": None, "eps": 1e-8}
        defaults |= {"weight_decay": 0.01, "precondition_frequency": 3, "max_dimension": 10_000}
        self.options = {**defaults, **options}
        self.w = weight.detach().double().clone()
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)
        self.t = 0
        self.covariances = [c.double().clone() for c in known]
        most = self.options["max_dimension"]
        self.rotates = [n <= most for n in self.w.shape]
        self.bases = [torch.eye(n, dtype=F64, device=self.w.device) for n in self.w.shape]

    def step(self, g: Tensor) -> None:
        g, o = g.double(), self.options
        (b1, b2), beta = o["betas"], o["shampoo_beta"]
        beta = b2 if beta is None else beta
        self.t += 1
        outer = g @ g.T, g.T @ g
        for i in [i for i in (0, 1) if self.rotates[i]]:
            c = self.covariances[i] = beta * self.covariances[i] + (1 - beta) * outer[i]
            q = self.bases[i]
            if self.t == 1:
                self.bases[i] = torch.linalg.eigh(c)[1].flip(1)
            elif self.t % o["precondition_frequency"] == 0:
                order = torch.diagonal(q.T @ c @ q).argsort(descending=True)
                self.v = self.v[order] if i == 0 else self.v[:, order]
                self.bases[i] = torch.linalg.qr(c @ q[:, order])[0]
        left, right = self.bases
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * (left.T @ g @ right) ** 2
        rotated = (left.T @ self.m @ right) / (self.v.sqrt() + o["eps"])
        update = left @ rotated @ right.T * (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
        self.w = (1 - o["lr"] * o["weight_decay"]) * self.w - o["lr"] * update


OPTIONS: list[dict[str, Any]] = [
    {},
    {"precondition_frequency": 1, "betas": (0.9, 0.8), "weight_decay": 0.0},
    {"precondition_frequency": 4, "shampoo_beta": 0.7, "eps": 1e-3, "lr": 0.02},
    {"max_dimension": 7},  # of (3, 8) the rows alone
    {"max_dimension": 2, "lr": torch.tensor(0.05, dtype=F64)},  # Adam
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_it_is_the_formula_for_matrices_and_adamw_for_the_rest(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    params = [nn.Parameter(p.detach().to(device)) for p in make_matrices(dtype)]
    theirs = twins(params)[3:]
    adamw = {"lr": options.get("lr", 3e-3), "betas": options.get("betas", (0.95, 0.95))}
    optimizer, reference = st.optim.SOAP(params, **options), st.optim.AdamW(theirs, **adamw)
    oracles = []
    for p in params[:3]:
        # Full rank from the start: otherwise rounding chooses some eigenvectors.
        roots = (torch.randn(n, 2 * n, dtype=dtype, device=device) for n in p.shape)
        known = tuple(root @ root.T / len(root) for root in roots)
        sides = zip(("left", "right"), known, strict=True)
        optimizer.state[p].update((side, c.clone()) for side, c in sides)
        oracles.append(Oracle(p, known, **options))
    for _ in range(10):
        give_gradients(params)
        for p, q in zip(params[3:], theirs, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        for p, oracle in zip(params, oracles, strict=False):
            oracle.step(p.grad)
    assert_bits(params[3:], bits(theirs))
    tight = {"rtol": 1e-9, "atol": 1e-11} if dtype == F64 else {"rtol": 1e-4, "atol": 1e-5}
    for p, oracle in zip(params, oracles, strict=False):
        torch.testing.assert_close(p.detach().double(), oracle.w, **tight)
        assert ("left_basis" in optimizer.state[p]) == oracle.rotates[0]
    # Streams that step and streams that save must be ordered.
    keys = ("exp_avg_sq", "left", "left_basis", "right", "right_basis")
    loose = [t for p in params[:3] for k, t in optimizer.state[p].items() if k in keys]
    found = {id(tensor) for tensor in optimizer.loose_state()}
    assert found >= {id(tensor) for tensor in loose} if device == "cuda" else not found


def test_a_group_is_of_one_kind() -> None:
    params = make_matrices()
    optimizer = st.optim.SOAP(params, 0.3, (0.5, 0.6), hidden=params[1:3], adamw={"eps": 0.1})
    assert [group["rotated"] for group in optimizer.param_groups] == [True, False]
    assert [group["params"] for group in optimizer.param_groups] == [
        params[1:3],
        [params[0], *params[3:]],
    ]
    rest = optimizer.param_groups[1]
    assert (rest["lr"], rest["betas"], rest["eps"]) == (0.3, (0.5, 0.6), 0.1)
    with pytest.raises(ValueError, match=r"rotated: expected matrices alone, .* \(7,\)"):
        optimizer.add_param_group({"params": [make_matrices()[3]], "rotated": True})


def test_state_is_written_in_place_and_no_narrower_than_float32() -> None:
    params = make_matrices(BF16)
    optimizer = st.optim.SOAP(params, max_dimension=7)
    give_gradients(params)
    optimizer.step()
    entries = [dict(optimizer.state[p]) for p in params]
    for side in ("left", "right"):
        basis = entries[0][f"{side}_basis"]
        values = (basis * (entries[0][side] @ basis)).sum(0)
        assert bool((values.diff() <= 1e-6).all())  # in descending order
    for _ in range(3):
        give_gradients(params)
        optimizer.step()
    for p, entry in zip(params, entries, strict=True):
        assert all(optimizer.state[p][key] is entry[key] for key in entry if key != "step")
    narrow = {"update_buffer", "exp_avg"}
    assert {k for k, t in entries[1].items() if t.dtype == BF16} == narrow
    shapes = {k: tuple(t.shape) for k, t in entries[1].items() if k not in narrow | {"step"}}
    assert shapes == {"exp_avg_sq": (3, 8), "left": (3, 3), "left_basis": (3, 3)}


def test_saved_state_has_to_be_whole() -> None:
    params = make_matrices()
    optimizer = st.optim.SOAP(params)
    give_gradients(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    state, load = optimizer.state[params[1]].values(), partial(optimizer.load_state_dict, saved)
    saved["state"][1]["right"] = torch.eye(3)
    wrong = r"1 of group 0: right must be .* \(8, 8\), got \(3, 3\)"
    refuses(load, ValueError, wrong, state)
    del saved["state"][1]["right"]
    refuses(load, ValueError, r"right must be .* \(8, 8\), got NoneType", state)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("late", [0, 2])
def test_a_gradient_that_is_not_finite_is_a_matrixs_own(value: float, late: int) -> None:
    params = make_matrices()
    optimizer = st.optim.SOAP(params)
    for step in range(4):
        give_gradients(params)
        if step == late:
            params[0].grad[0, 0] = value
        optimizer.step()
    assert params[0].isnan().all()
    assert all(bool(p.isfinite().all()) for p in params[1:])
