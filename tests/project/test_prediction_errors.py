"""Tests measured prediction errors against the laws' definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pipeline_cases import batches, float64, mse, sgd, tanh_stages  # noqa: F401
from prediction_errors import HORIZONS, LAWS, STEPPED, Errors, rmse
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.schedule import Kind

LR, MU = 0.05, 0.9
Handler = Callable[[int, int], None]


class Noted(st.Observer):
    """NumPy copies of every stage's true weights, momentum and gradients after every update."""

    def __init__(self, pipe: st.Pipeline) -> None:
        self.pipe = pipe
        self.weights: dict[int, list[np.ndarray]] = {}
        self.state: dict[int, list[dict[str, np.ndarray]]] = {}

    def watch(self, stage: Any, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        k, update = stage.index, handlers[Kind.UPDATE]
        weights, state = self.weights.setdefault(k, []), self.state.setdefault(k, [])

        def noted(i: int, j: int) -> None:
            params = list(self.pipe.optimizers[k].param_groups[0]["params"])
            gradient = flat([p.grad for p in params])
            update(i, j)
            # the true ones, since the run has not ended
            saved = self.pipe.state_dict()
            names = [f"{k}.{name}" for name, _ in stage.module.named_parameters()]
            weights.append(flat([saved[name] for name in names]))
            entries = [self.pipe.optimizers[k].state[p] for p in params]
            found = {key: flat([e[key] for e in entries]) for key in entries[0]}
            state.append({**found, "gradient": gradient})

        return {**handlers, Kind.UPDATE: noted}


def flat(tensors: list[Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().numpy().astype(np.float64).ravel() for t in tensors])


def measured(
    optimizer: Any,
    data: list[tuple[Tensor, Tensor]],
    horizons: tuple[int, ...] = HORIZONS,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = mse,
    method: str = "spectrain",
    stages: int = 3,
) -> tuple[Errors, Noted]:
    pipe = st.Pipeline(tanh_stages(stages), optimizer, loss_fn, method)
    errors, noted = Errors(horizons), Noted(pipe)
    for _ in pipe.run(data, trace=[errors, noted]):
        pass
    return errors, noted


def adamw(params: Any) -> st.optim.AdamW:
    return st.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [sgd(), adamw], ids=["sgd", "adamw"])
def test_nothing_ahead_is_no_error(optimizer: Any) -> None:
    errors, _ = measured(optimizer, batches(6), horizons=(0,))
    assert {error.law for error in errors.found} == {*LAWS}
    assert len(errors.found) == 3 * 5 * len(LAWS)  # stages, updates but the first
    assert all(error.norm == 0.0 for error in errors.found)


def test_without_gradients_the_geometric_law_is_right() -> None:
    """This is its definition; no other law satisfies it."""
    real = 5
    data = [(x, y * (i < real)) for i, (x, y) in enumerate(batches(real + 20))]
    errors, noted = measured(sgd(), data, loss_fn=lambda out, weight: (out * weight).sum())
    found = [error for error in errors.found if error.update >= real]
    assert {error.ahead for error in found} == {*HORIZONS}
    for error in found:
        moved = math.sqrt(sum(noted.weights[error.stage][error.update] ** 2))
        if error.law == "geometric":
            assert error.norm < 1e-14 * moved
        else:
            assert error.norm > 1e-9 * moved, error.law


def test_one_update_ahead_the_linear_law_errs_by_the_change_of_the_momentum() -> None:
    """W[t+1] - (W[t] - lr*v[t]) = -lr*(v[t+1] - v[t]) = -lr*(g[t+1] - (1 - mu)*v[t])."""
    errors, noted = measured(sgd(lr=LR, momentum=MU), batches(12), horizons=(1,))
    found = [error for error in errors.found if error.law == "linear"]
    assert len(found) == 3 * 10
    for error in found:
        now, then = (noted.state[error.stage][error.update + i] for i in (-1, 0))
        change = then["gradient"] - (1 - MU) * now["momentum_buffer"]
        assert error.norm == pytest.approx(LR * np.linalg.norm(change), rel=1e-9)


def by_definition(law: str, s: int, noted: Noted, k: int, t: int) -> np.ndarray:
    """The prediction from the weights after update t of SGD, in NumPy."""
    w, v = noted.weights[k][t - 1], noted.state[k][t - 1]["momentum_buffer"]
    change = v - noted.state[k][t - 2]["momentum_buffer"]
    return {
        "stale": lambda: w,
        "linear": lambda: w - LR * s * v,
        "geometric": lambda: w - LR * sum(MU**i for i in range(1, s + 1)) * v,
        "second-order": lambda: w - LR * (s * v + s * (s + 1) / 2 * change),
        "difference": lambda: w + s * (w - noted.weights[k][t - 2]),
    }[law]()


@pytest.mark.parametrize(
    ("method", "stages"), [("spectrain", 3), ("auto", 3), ("pipedream", 2), ("sync", 1)]
)
def test_errors_of_sgd_are_those_of_numpy(method: str, stages: int) -> None:
    data = batches(20, size=4)
    errors, noted = measured(sgd(lr=LR, momentum=MU), data, method=method, stages=stages)
    assert {error.law for error in errors.found} == {*LAWS}
    for error in errors.found:
        k, t, s = error.stage, error.update, error.ahead
        off = by_definition(error.law, s, noted, k, t) - noted.weights[k][t - 1 + s]
        assert error.norm == pytest.approx(np.linalg.norm(off), rel=1e-8, abs=1e-13)
        size = np.sqrt(np.mean(off**2))
        assert rmse([error], errors.elements) == pytest.approx(size, rel=1e-8, abs=1e-13)
    together = [error for error in errors.found if error[1:4] == (2, 3, "linear")]
    assert len(together) == stages
    offs = [by_definition("linear", 3, noted, k, 2) - noted.weights[k][4] for k in range(stages)]
    size = np.sqrt(np.mean(np.concatenate(offs) ** 2))
    assert rmse(together, errors.elements) == pytest.approx(size, rel=1e-8)


def test_errors_of_adamw_are_those_of_numpy() -> None:
    errors, noted = measured(adamw, batches(20))
    for error in errors.found:
        k, t, s = error.stage, error.update, error.ahead
        w, state = noted.weights[k][t - 1], noted.state[k][t - 1]
        m, u = state["exp_avg"], state["exp_avg_sq"]
        if error.law not in ("linear", "geometric"):
            continue
        for i in range(1, s + 1):
            linear = error.law == "linear"
            at, by = (t, m) if linear else (t + i, 0.8**i * m)
            w = w if linear else w * (1 - 1e-2 * 0.1)
            w = w - 1e-2 * by / (1 - 0.8**at) / (np.sqrt(u / (1 - 0.95**at)) + 1e-8)
        off = np.linalg.norm(w - noted.weights[k][t - 1 + s])
        assert error.norm == pytest.approx(off, rel=1e-8)


def test_looking_changes_no_bit_of_what_is_trained() -> None:
    def trained(*observers: st.Observer) -> list[Tensor]:
        torch.manual_seed(1)
        pipe = st.Pipeline(tanh_stages(3), adamw, mse, "auto", microbatches=2)
        for _ in pipe.run(batches(10, size=4), trace=observers):
            pass
        pipe.release()
        return list(pipe.parameters())

    assert all(map(torch.equal, trained(), trained(Errors(every=2))))


def test_all_laws_are_measured() -> None:
    """The predicting ones by name; stale weights need no law."""
    assert {*STEPPED, "difference", "average"} == {
        "linear",
        *(st.method.find_method(name).law for name in st.methods()),
    }
