"""Tests measured prediction errors against the laws' definitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.pipeline_cases import batches, float64, mse, sgd, tanh_stages  # noqa: F401
from prediction_errors import HORIZONS, LAWS, STEPPED, Errors, rmse
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.schedule import Kind

LR, MU = 0.05, 0.9
Handler = Callable[[int, int], None]


class Noted(st.Observer):
    """NumPy copies of every stage's true weights and momentum after every update."""

    def __init__(self, pipe: st.Pipeline) -> None:
        self.pipe = pipe
        self.weights: dict[int, list[np.ndarray]] = {}
        self.state: dict[int, list[dict[str, np.ndarray]]] = {}

    def watch(self, run: Any, handlers: dict[Kind, Handler]) -> dict[Kind, Handler]:
        stage = run.stage
        k, update = stage.index, handlers[Kind.UPDATE]
        weights, state = self.weights.setdefault(k, []), self.state.setdefault(k, [])

        def noted(i: int, j: int) -> None:
            params = list(self.pipe.optimizers[k].param_groups[0]["params"])
            update(i, j)
            # the true ones, since the run has not ended
            saved = self.pipe.state_dict()
            names = [f"{k}.{name}" for name, _ in stage.module.named_parameters()]
            weights.append(flat([saved[name] for name in names]))
            entries = [self.pipe.optimizers[k].state[p] for p in params]
            state.append({key: flat([e[key] for e in entries]) for key in entries[0]})

        return {**handlers, Kind.UPDATE: noted}


def flat(tensors: list[Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().numpy().astype(np.float64).ravel() for t in tensors])


def by_sgd(law: str, s: int, noted: Noted, k: int, t: int) -> np.ndarray:
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
def test_errors_are_those_of_numpy(method: str, stages: int) -> None:
    optimizer = sgd(lr=LR, momentum=MU)
    pipe = st.Pipeline(tanh_stages(stages), optimizer, mse, method)
    errors, noted = Errors((0, *HORIZONS)), Noted(pipe)
    for _ in pipe.run(batches(20, size=4), trace=[errors, noted]):
        pass
    seen = {(error.law, error.ahead) for error in errors.found}
    assert seen == set(itertools.product(LAWS, (0, *HORIZONS)))
    for error in errors.found:
        k, t, s = error.stage, error.update, error.ahead
        expected = by_sgd(error.law, s, noted, k, t)
        if s == 0:  # nothing ahead is no error
            assert error.norm == 0.0
        else:
            off = expected - noted.weights[k][t - 1 + s]
            assert error.norm == pytest.approx(np.linalg.norm(off), rel=1e-8, abs=1e-13)
            size = np.sqrt(np.mean(off**2))
            assert rmse([error], errors.elements) == pytest.approx(size, rel=1e-8, abs=1e-13)


def test_all_laws_are_measured() -> None:
    """The predicting ones by name; stale weights need no law."""
    assert {*STEPPED, "difference", "average"} == {
        "linear",
        *(st.method.find_method(name).law for name in st.methods()),
    }
