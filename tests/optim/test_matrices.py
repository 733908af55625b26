"""Tests Muon and SOAP: steps against torch and in float64, groups, predictions, state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers import optim_cases as cases
from helpers.pipeline_cases import mse
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.method import find_method, places_of, rules_at

REST = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.05}


def muon(params: Any, **options: Any) -> st.optim.Muon:
    return st.optim.Muon(params, 0.02, adamw=REST, **options)


def soap(params: Any, **options: Any) -> st.optim.SOAP:
    # If covariances lack full rank, an eps of 1e-8 is no larger than rounding.
    return st.optim.SOAP(params, 0.02, eps=1e-3, adamw=REST, **options)


BOTH = pytest.mark.parametrize("make", [muon, soap])


class Reference:
    """Two optimizers, torch's or our SOAP, and the laws' predictions from their last steps."""

    def __init__(self, params: Sequence[Tensor], make: Any = muon, **options: Any) -> None:
        self.params = list(params)
        matrices = [p for p in self.params if p.dim() == 2]
        rest = [p for p in self.params if p.dim() != 2]
        first = soap(matrices) if make is soap else torch_muon(matrices, **options)
        self.parts = [first, torch.optim.AdamW(rest, **REST)]
        self.steps = 0
        self.now = [torch.zeros_like(p) for p in self.params]  # updates, for AdamW with lr
        self.change = self.now

    def step(self) -> None:
        before = cases.bits(self.params)
        moments = [self._state(p).get("exp_avg", torch.zeros(())).clone() for p in self.params]
        for part in self.parts:
            part.step()
        self.steps += 1
        last, self.now, self.change = self.now, [], []
        for p, w, u, m in zip(self.params, before, last, moments, strict=True):
            group = self.parts[0 if p.dim() == 2 else -1].param_groups[0]
            if p.dim() == 2:
                new = w * (1 - group["lr"] * group["weight_decay"]) - p.detach()
                self.now.append(new)
                self.change.append(new - u if self.steps > 1 else torch.zeros_like(u))
            else:
                state, (b1, b2) = self._state(p), group["betas"]
                root = (state["exp_avg_sq"] / (1 - b2**self.steps)).sqrt() + group["eps"]
                rate = group["lr"] / (1 - b1**self.steps) / root
                self.now.append(rate * state["exp_avg"])
                self.change.append(rate * (state["exp_avg"] - m))

    def _state(self, p: Tensor) -> Any:
        return next((part.state[p] for part in self.parts if p in part.state), {})

    def ahead(self, steps: float, changes: float = 0.0) -> list[Tensor]:
        """Predict by several last updates and their changes; matrices count half of the changes."""
        rows = zip(self.params, self.now, self.change, strict=True)
        halves = [changes / 2 if p.dim() == 2 else changes for p in self.params]
        moved = [p.detach() - steps * u for p, u, _ in rows]
        return [w - n * c for w, n, c in zip(moved, halves, self.change, strict=True)]


MUON_OPTIONS: list[dict[str, Any]] = [
    {},
    {"adjust_lr_fn": "original", "weight_decay": 0.0, "nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3},
    {"ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-3},
]


@pytest.mark.parametrize("options", MUON_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [cases.F32, cases.F64, cases.BF16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_muon_is_torchs_two_optimizers(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    ours = [nn.Parameter(p.detach().to(device)) for p in cases.make_matrices(dtype)]
    theirs = cases.twins(ours)
    # Without Nesterov's torch normalizes a bfloat16 momentum in place.
    options = {**options, "nesterov": True} if dtype == cases.BF16 else options
    optimizer, reference = muon(ours, **options), Reference(theirs, **options)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(each, 5, gamma=0.5)
        for each in (optimizer, *reference.parts)
    ]
    for step in range(20):
        cases.give_gradients(ours, theirs, none=[2, 3] if step in (0, 7) else [])
        for each in (optimizer, *reference.parts, *schedulers):
            each.step()
    cases.assert_same(ours, theirs)
    for p, q in zip(ours[:3], theirs[:3], strict=True):
        theirs_of = reference.parts[0].state[q]["momentum_buffer"]
        cases.assert_same([optimizer.state[p]["momentum_buffer"]], [theirs_of])


def test_a_group_is_of_one_kind() -> None:
    params, convolution = cases.make_matrices(), nn.Parameter(torch.randn(2, 2, 3, 3))
    optimizer = muon([("a", params[0]), ("b", params[3])], adjust_lr_fn="original")
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert [group["param_names"] for group in optimizer.param_groups] == [["a"], ["b"]]
    optimizer = muon(params[:2], hidden=params[1:3])
    assert [group["params"] for group in optimizer.param_groups] == [params[1:2], params[:1]]
    assert "momentum" not in optimizer.param_groups[1]
    assert optimizer.param_groups[1]["lr"] == REST["lr"]
    copied = pickle.loads(pickle.dumps(optimizer))
    copied.add_param_group({"params": [convolution], "betas": (0.5, 0.6)})
    assert copied.param_groups[2]["betas"] == (0.5, 0.6)
    assert copied.param_groups[2]["weight_decay"] == REST["weight_decay"]
    optimizer = st.optim.Muon(params, 0.3, adjust_lr_fn="match_rms_adamw")
    assert optimizer.param_groups[1]["lr"] == 0.3
    assert st.optim.Muon(params, 0.3).param_groups[1]["lr"] == 1e-3
    with pytest.raises(ValueError, match="both; give each a group of its own"):
        optimizer.add_param_group({"params": [*cases.make_matrices()], "lr": 0.1})
    with pytest.raises(ValueError, match=r"use_muon: expected matrices alone, .* \(2, 2, 3, 3\)"):
        optimizer.add_param_group({"params": [convolution], "use_muon": True})
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": [cases.make_matrices()[0], params[4]]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [], "use_muon": False})
    assert optimizer.param_groups[2].keys() == optimizer.param_groups[1].keys()
    optimizer = st.optim.SOAP(params, 0.3, (0.5, 0.6), hidden=params[1:3], adamw={"eps": 0.1})
    assert [group["rotated"] for group in optimizer.param_groups] == [True, False]
    rest = optimizer.param_groups[1]
    assert (rest["lr"], rest["betas"], rest["eps"]) == (0.3, (0.5, 0.6), 0.1)
    for make in (muon, soap):
        with pytest.raises(TypeError, match=r"hidden\[0\]: expected a parameter, got '0.weight'"):
            make(params, hidden=["0.weight"])
        with pytest.raises(ValueError, match=r"hidden\[1\]: .* of shape \(2, 3, 2\)"):
            make(params, hidden=[params[0], params[4]])


def test_hidden_matrices_lie_between_embeddings_and_head() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4))
    model = nn.Sequential(nn.Embedding(5, 4), body, nn.LayerNorm(4), nn.Linear(4, 5))
    matrices = {p for p in body.parameters() if p.dim() == 2}
    assert st.optim.hidden_matrices(model) == matrices
    model[3].weight = model[0].weight  # tied
    assert st.optim.hidden_matrices(model) == matrices


@BOTH
def test_a_pipeline_refuses_hidden_matrices_that_no_stage_has(make: Any) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def pipe_of(parts: Any, hidden: Any) -> st.Pipeline:
        return st.Pipeline(parts, lambda params: make(params, hidden=hidden), mse)

    with torch.device("meta"):
        model = network()
    stages = st.partitioning.cut_at(model, [2, 4])
    early = st.optim.hidden_matrices(model)
    st.materialize(stages)
    with pytest.raises(ValueError, match=r"train 0 of the 3 .* shape \(4, 4\) on meta"):
        pipe_of(stages, early)
    hidden = st.optim.hidden_matrices(model)
    for foreign in (nn.Parameter(torch.zeros(4, 4)), model[1].weight.detach()):
        with pytest.raises(ValueError, match=r"train 3 of the 4 matrices in hidden, .* on cpu"):
            pipe_of(stages, {*hidden, foreign})
    model[1].weight.requires_grad_(False)  # LoRA's frozen matrices may be in it
    first, second = pipe_of(stages, hidden).optimizers
    assert [len(group["params"]) for group in first.param_groups] == [1, 2]
    assert [len(group["params"]) for group in second.param_groups] == [1, 3]


@BOTH
@pytest.mark.parametrize("dtype", [cases.F64, cases.BF16], ids=str)
def test_bound_with_a_master(dtype: torch.dtype, make: Any) -> None:
    """State stays in the given buffers, and a step also writes the prediction."""
    wide = cases.F64 if dtype == cases.F64 else cases.F32
    ours = cases.make_matrices(dtype)
    master = {p: p.detach().to(wide) for p in ours}
    theirs = [nn.Parameter(w.clone()) for w in master.values()]
    optimizer, reference = make(ours), Reference(theirs, make)
    buffers = {
        key: {p: torch.full_like(master[p], 7) for p in ours}
        for key in optimizer.stepper.buffer_keys
    }
    optimizer.stepper.bind(master, buffers)
    assert optimizer.stepper.is_bound_to(buffers)
    outs = {p: torch.full_like(p.detach(), 9) for p in ours}

    optimizer.stepper.predict(outs, cases.law_of(3))
    cases.assert_bits(outs.values(), ours)

    def step(law: Any, none: Sequence[int] = ()) -> None:
        cases.give_gradients(ours, none=none)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = None if p.grad is None else p.grad.to(wide)
        optimizer.stepper.step(write=(outs, law))
        reference.step()
        cases.assert_same(list(master.values()), theirs)

    def written(expected: Sequence[Tensor]) -> None:
        cases.assert_same(list(outs.values()), [w.to(dtype) for w in expected])

    step(st.laws.SecondOrder(3, 1))
    written(reference.ahead(4, 6))
    for delay in (1, 2, 4, 7):
        step(st.laws.SecondOrder(delay, 2))
        written(reference.ahead(delay + 2, delay * (delay + 1) / 2))
        optimizer.stepper.predict(outs, cases.law_of(delay))
        written(reference.ahead(delay))
    decays = 1 - 0.02 * (0.01 if make is soap else 0.1)
    optimizer.stepper.predict(outs, st.laws.Geometric(2))
    twice = theirs[0].detach() * decays**2 - (1 + decays) * reference.now[0]
    cases.assert_same([outs[ours[0]]], [twice.to(dtype)])
    updates = buffers["update_buffer"]
    assert optimizer.state[ours[0]]["update_buffer"] is updates[ours[0]]
    assert optimizer.state[ours[3]]["exp_avg"] is updates[ours[3]]
    held = reference.ahead(3)  # parameters without a gradient: by their last update alone
    step(st.laws.SecondOrder(1, 2), none=[0, 4])
    written([(held if i in (0, 4) else reference.ahead(3, 1))[i] for i in range(len(ours))])
    optimizer.stepper.unbind()
    assert optimizer.state[ours[0]]["update_buffer"] is not updates[ours[0]]


@pytest.mark.parametrize("to_torch", [False, True])
def test_state_of_torchs_muon(to_torch: bool) -> None:
    ours = cases.make_matrices(cases.F32)[:3]
    theirs = cases.twins(ours)
    kinds = (st.optim.Muon, torch.optim.Muon) if to_torch else (torch.optim.Muon, st.optim.Muon)
    first, second = kinds[0](ours, lr=0.02), kinds[1](theirs, lr=0.5)
    for _ in range(3):
        cases.give_gradients(ours)
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.detach())
    if not to_torch:
        with second.predicted(3):  # the last update is unknown
            cases.assert_bits(theirs, cases.bits(ours))
    for _ in range(3):
        cases.give_gradients(ours, theirs)
        first.step()
        second.step()
    cases.assert_same(ours, theirs)


def test_auto_predicts_along_its_own_update() -> None:
    place = places_of(find_method("auto"), 4, 4)[0]
    expected = {muon: "second-order", soap: "second-order", torch_muon: "difference"}
    for make, law in expected.items():
        assert rules_at(find_method("auto"), place, make(cases.make_matrices())).law == law


def torch_muon(params: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02, **options)


# SOAP


class SoapOracle:
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
        self.bases = [torch.eye(n, dtype=cases.F64, device=self.w.device) for n in self.w.shape]

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


SOAP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"precondition_frequency": 1, "betas": (0.9, 0.8), "weight_decay": 0.0},
    {"precondition_frequency": 4, "shampoo_beta": 0.7, "eps": 1e-3, "lr": 0.02},
    {"max_dimension": 7},  # of (3, 8) the rows alone
    {"max_dimension": 2, "lr": torch.tensor(0.05, dtype=cases.F64)},  # Adam
]


@pytest.mark.parametrize("options", SOAP_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [cases.F64, cases.F32], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_soap_is_the_formula_for_matrices_and_adamw_for_the_rest(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    params = [nn.Parameter(p.detach().to(device)) for p in cases.make_matrices(dtype)]
    theirs = cases.twins(params)[3:]
    adamw = {"lr": options.get("lr", 3e-3), "betas": options.get("betas", (0.95, 0.95))}
    optimizer, reference = st.optim.SOAP(params, **options), st.optim.AdamW(theirs, **adamw)
    oracles = []
    for p in params[:3]:
        # Full rank from the start: otherwise rounding chooses some eigenvectors.
        roots = (torch.randn(n, 2 * n, dtype=dtype, device=device) for n in p.shape)
        known = tuple(root @ root.T / len(root) for root in roots)
        sides = zip(("left", "right"), known, strict=True)
        optimizer.state[p].update((side, c.clone()) for side, c in sides)
        oracles.append(SoapOracle(p, known, **options))
    for _ in range(10):
        cases.give_gradients(params)
        for p, q in zip(params[3:], theirs, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        for p, oracle in zip(params, oracles, strict=False):
            oracle.step(p.grad)
    cases.assert_bits(params[3:], cases.bits(theirs))
    tight = {"rtol": 1e-9, "atol": 1e-11} if dtype == cases.F64 else {"rtol": 1e-4, "atol": 1e-5}
    for p, oracle in zip(params, oracles, strict=False):
        torch.testing.assert_close(p.detach().double(), oracle.w, **tight)
        assert ("left_basis" in optimizer.state[p]) == oracle.rotates[0]
    # Streams that step and streams that save must be ordered.
    keys = ("exp_avg_sq", "left", "left_basis", "right", "right_basis")
    loose = [t for p in params[:3] for k, t in optimizer.state[p].items() if k in keys]
    found = {id(tensor) for tensor in optimizer.stepper.loose_state()}
    assert found >= {id(tensor) for tensor in loose} if device == "cuda" else not found


def test_soaps_state_is_written_in_place_and_no_narrower_than_float32() -> None:
    params = cases.make_matrices(cases.BF16)
    optimizer = st.optim.SOAP(params, max_dimension=7)
    cases.give_gradients(params)
    optimizer.step()
    entries = [dict(optimizer.state[p]) for p in params]
    for side in ("left", "right"):
        basis = entries[0][f"{side}_basis"]
        values = (basis * (entries[0][side] @ basis)).sum(0)
        assert bool((values.diff() <= 1e-6).all())  # in descending order
    for _ in range(3):
        cases.give_gradients(params)
        optimizer.step()
    for p, entry in zip(params, entries, strict=True):
        assert all(optimizer.state[p][key] is entry[key] for key in entry if key != "step")
    narrow = {"update_buffer", "exp_avg"}
    assert {k for k, t in entries[1].items() if t.dtype == cases.BF16} == narrow
    shapes = {k: tuple(t.shape) for k, t in entries[1].items() if k not in narrow | {"step"}}
    assert shapes == {"exp_avg_sq": (3, 8), "left": (3, 3), "left_basis": (3, 3)}


def test_saved_state_of_soap_has_to_be_whole() -> None:
    params = cases.make_matrices()
    optimizer = st.optim.SOAP(params)
    cases.give_gradients(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    state, load = optimizer.state[params[1]].values(), partial(optimizer.load_state_dict, saved)
    saved["state"][1]["right"] = torch.eye(3)
    wrong = r"1 of group 0: right must be .* \(8, 8\), got \(3, 3\)"
    cases.refuses(load, ValueError, wrong, state)
    del saved["state"][1]["right"]
    cases.refuses(load, ValueError, r"right must be .* \(8, 8\), got NoneType", state)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("late", [0, 2])
def test_a_gradient_that_is_not_finite_is_a_matrixs_own(value: float, late: int) -> None:
    params = cases.make_matrices()
    optimizer = st.optim.SOAP(params)
    for step in range(4):
        cases.give_gradients(params)
        if step == late:
            params[0].grad[0, 0] = value
        optimizer.step()
    assert params[0].isnan().all()
    assert all(bool(p.isfinite().all()) for p in params[1:])
