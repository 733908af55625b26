"""Tests the errors of prediction laws for unsupported input, and the requirements they name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import spectrain_ext as st
from spectrain_ext.operators.laws import (
    MAX_TERMS,
    Geometric,
    Linear,
    SecondOrder,
    as_law,
)
from spectrain_ext.operators.numbers import Adam, Sgd, Term


class TestErrors:
    """Numbers, momentum, and user-defined laws."""

    @pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -1e-300])
    @pytest.mark.parametrize("make", [Linear, Geometric, SecondOrder])
    def test_numbers_out_of_range(self, make: Any, value: float) -> None:
        with pytest.raises(ValueError, match=r"steps|delay"):
            make(value)

    @pytest.mark.parametrize("value", ["1", None, [1.0], 1j], ids=repr)
    @pytest.mark.parametrize("make", [Linear, Geometric, SecondOrder])
    def test_no_numbers(self, make: Any, value: object) -> None:
        with pytest.raises(TypeError, match=r"steps|delay"):
            make(value)

    def test_lead_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="lead"):
            SecondOrder(1.0, -1.5)

    def test_the_geometric_law_needs_momentum(self) -> None:
        w, v = torch.randn(9), torch.randn(9)
        before = w.clone()
        with pytest.raises(ValueError, match="momentum"):
            st.predict_(w, v, lr=0.1, steps=Geometric(2))
        assert torch.equal(w, before)

    def test_a_horizon_that_is_neither_number_nor_law(self) -> None:
        for bad in ("2", None, object(), [2.0]):
            with pytest.raises(TypeError, match="steps"):
                as_law(bad)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("steps", "came"),
        [
            (Geometric, "the class Geometric"),
            ("geometric", "'geometric'"),
            (True, "True"),
            (None, "None"),
        ],
        ids=str,
    )
    def test_what_is_taken_for_a_horizon(self, steps: Any, came: str) -> None:
        """All messages use the same words and name the alternative."""
        w, v, g, out = lists = [torch.randn(9) for _ in range(4)]
        plan = st.Plan(w, momentum_buffers=v, grads=g, stashed=torch.zeros(9), outs=[out])
        before = [t.clone() for t in lists]
        numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        optimizer = st.optim.SGD([torch.ones(2, requires_grad=True)], **numbers)
        calls = {
            "steps": [
                lambda: st.predict_(w, v, lr=0.1, steps=steps),
                lambda: plan.predict_(lr=0.1, steps=steps),
                lambda: plan.predict([Sgd(0.1, 0.9)], steps=steps),
                lambda: plan.extrapolate(steps=steps),
                lambda: Linear(steps),
                lambda: optimizer.predict_(steps),
            ],
            "predict[0]": [
                lambda: plan.sgd_step_(**numbers, predict=[steps]),
                lambda: plan.sgd_step_([Sgd(0.1, 0.9)], predict=[steps]),
                lambda: st.sgd_step_(w, g, v, **numbers, predict=[(steps, out)]),
            ],
        }
        if steps is None:  # a plan then skips the out
            del calls["predict[0]"][:2]
        for name, each in calls.items():
            for call in each:
                with pytest.raises(TypeError) as caught:
                    call()
                assert str(caught.value).startswith(f"{name}: expected a number of "), name
                assert steps is None or "laws.Geometric(2)" in str(caught.value)
                assert str(caught.value).endswith(f"got {came}")
        assert all(map(torch.equal, lists, before))

    def test_a_bool_is_not_taken_for_the_one_that_was_remembered(self) -> None:
        w, v, g, out = (torch.randn(9) for _ in range(4))
        plan = st.Plan(w, momentum_buffers=v, grads=g, outs=[out])
        for one in (1, 1.0):
            plan.sgd_step_(lr=0.1, momentum=0.9, predict=[one])
        with pytest.raises(TypeError, match=r"predict\[0\]: .* got True"):
            plan.sgd_step_(lr=0.1, momentum=0.9, predict=[True])

    @pytest.mark.parametrize("n_terms", [2, 9, 65])
    def test_a_law_of_ones_own_with_more_terms_than_sgd_takes(self, n_terms: int) -> None:
        """Every term counts, or the law is rejected."""

        class Own:
            def sgd(self, numbers: Sgd) -> list[Term]:
                return [Term(1.0, numbers.lr)] * n_terms

            def adam(self, numbers: Adam) -> list[Term]:
                return []

        w, v = torch.zeros(9), torch.ones(9)
        try:
            got = st.predict(w, v, lr=1.0, steps=Own(), momentum=0.9)
        except ValueError as error:
            assert re.search("steps|terms?", str(error))
        else:
            assert got.tolist() == [-float(n_terms)] * 9
        out = torch.zeros(9)
        try:
            st.sgd_step_(w, torch.zeros(9), v, lr=1.0, momentum=1.0, predict=[(Own(), out)])
        except ValueError as error:
            assert re.search("predict|steps|terms?", str(error))
        else:
            assert out.tolist() == [-1.0 - n_terms] * 9

    def test_how_many_terms_there_are(self) -> None:
        assert MAX_TERMS == 64
