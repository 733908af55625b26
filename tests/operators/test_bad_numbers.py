"""Tests invalid numbers, options and refreshed gradients, like test_bad_input.py for lists."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from helpers.bad_input import BAD, BY_NAME, COUNT, NAN, SHAPE, Lists, Op, raises
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws


class TestNumbers:
    """Invalid scalars."""

    _SCALED: ClassVar = [
        BY_NAME[n] for n in ("predict_", "predict", "stash_predict_", "adam_predict")
    ]

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "steps"])
    @pytest.mark.parametrize("value", [-1.0, -1e-300, NAN, -math.inf])
    def test_negative_or_nan(self, op: Op, name: str, value: float) -> None:
        lists = op.build()
        raises(ValueError, rf"\b{name}\b", lambda: op(lists, **{name: value}), lists, str(value))

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "steps"])
    @pytest.mark.parametrize("value", ["0.1", None, [0.1], 1j], ids=repr)
    def test_no_number(self, op: Op, name: str, value: object) -> None:
        lists = op.build()
        raises(TypeError, rf"^{name}: ", lambda: op(lists, **{name: value}), lists)

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "steps"])
    def test_missing(self, op: Op, name: str) -> None:
        lists = op.build()
        arguments = {k: v for k, v in op.scalars if k != name}
        raises(TypeError, name, lambda: op.call(**lists, **arguments), lists)

    @pytest.mark.parametrize("op", _SCALED, ids=lambda op: op.name)
    def test_also_when_there_is_nothing_to_do(self, op: Op) -> None:
        empty: Lists = {n: [] for n in op.lists}
        with pytest.raises(ValueError, match="lr"):
            op(empty, lr=-1.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"lr": -1.0},
            {"lr": NAN},
            {"momentum": -0.1},
            {"momentum": NAN},
            {"weight_decay": NAN},
            {"weight_decay": -1.0},
            {"dampening": NAN},
        ],
        ids=str,
    )
    def test_of_the_step(self, changes: dict[str, float]) -> None:
        op = BY_NAME["sgd_step_"]
        lists = op.build()
        (name,) = changes
        raises(ValueError, name, lambda: op(lists, **changes), lists)

    @pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "dampening"])
    def test_no_number_in_the_step(self, name: str) -> None:
        op = BY_NAME["sgd_step_"]
        lists = op.build()
        raises(TypeError, rf"^{name}: ", lambda: op(lists, **{name: "0.1"}), lists)

    @pytest.mark.parametrize("steps", [-1.0, NAN])
    def test_of_a_prediction_in_the_step(self, steps: float) -> None:
        op = BY_NAME["sgd_step_"]
        lists = op.build()
        raises(ValueError, r"predict\[1\]|steps", lambda: op(lists, steps=steps), lists)


class TestStep:
    """Errors of sgd_step_ alone."""

    def _lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        return tuple([torch.randn(SHAPE) for _ in range(COUNT)] for _ in range(4))  # type: ignore[return-value]

    def test_a_prediction_without_momentum(self) -> None:
        w, g, v, out = self._lists()
        for buffers in (v, None):
            raises(
                ValueError,
                "momentum",
                lambda buffers=buffers: st.sgd_step_(  # type: ignore[misc]
                    w, g, buffers, lr=0.1, momentum=0.0, predict=[(1.0, out)]
                ),
                (w, g, v, out),
                "predict",
            )

    def test_momentum_without_buffers(self) -> None:
        w, g, v, _ = self._lists()
        raises(
            ValueError,
            "momentum_buffers",
            lambda: st.sgd_step_(w, g, None, lr=0.1, momentum=0.9),
            (w, g, v),
        )

    @pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
    def test_nesterov_needs_momentum_and_no_dampening(self, options: dict[str, float]) -> None:
        """As in torch.optim.SGD."""
        w, g, v, _ = self._lists()
        raises(
            ValueError,
            "nesterov",
            lambda: st.sgd_step_(w, g, v, lr=0.1, nesterov=True, **options),
            (w, g, v),
        )

    @pytest.mark.parametrize("flags", [[True], [True] * (COUNT + 1), []])
    def test_first_step_of_another_length(self, flags: list[bool]) -> None:
        w, g, v, _ = self._lists()
        raises(
            ValueError,
            "first_step",
            lambda: st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, first_step=flags),
            (w, g, v),
            str(COUNT),
            str(len(flags)),
        )

    @pytest.mark.parametrize("flags", ["yes", 1.5, ["yes"] * COUNT, None], ids=repr)
    def test_first_step_of_another_kind(self, flags: object) -> None:
        w, g, v, _ = self._lists()
        raises(
            TypeError,
            "first_step",
            lambda: st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, first_step=flags),  # type: ignore[arg-type]
            (w, g, v),
        )

    @pytest.mark.parametrize("bad", [3, (1.0,), (1.0, None, None), ("x", None)], ids=repr)
    def test_an_entry_of_predict_that_is_no_pair(self, bad: object) -> None:
        w, g, v, out = self._lists()
        raises(
            (TypeError, ValueError),
            r"predict(\[1\])?",
            lambda: st.sgd_step_(
                w,
                g,
                v,
                lr=0.1,
                momentum=0.9,
                predict=[(1.0, out), bad],  # type: ignore[list-item]
            ),
            (w, g, v, out),
        )


class TestAdamStep:
    """Errors of adam_step_ and adam_predict alone."""

    _BOTH: ClassVar = [BY_NAME["adam_step_"], BY_NAME["adam_predict"]]

    @pytest.mark.parametrize("op", _BOTH, ids=lambda op: op.name)
    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"lr": -1.0}, "lr"),
            ({"lr": NAN}, "lr"),
            ({"eps": -1e-8}, "eps"),
            ({"eps": NAN}, "eps"),
            ({"eps": math.inf}, "eps"),
            ({"weight_decay": -0.1}, "weight_decay"),
            ({"weight_decay": NAN}, "weight_decay"),
            ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
            ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
            ({"betas": (-0.1, 0.9)}, r"betas\[0\]"),
            ({"betas": (0.9, NAN)}, r"betas\[1\]"),
            ({"betas": (0.9,)}, "betas"),
            ({"betas": (0.9, 0.9, 0.9)}, "betas"),
            ({"step": 0}, "step"),
            ({"step": -3}, "step"),
            ({"step": 1.5}, "step"),
            ({"step": NAN}, "step"),
        ],
        ids=str,
    )
    def test_out_of_range(self, op: Op, changes: dict[str, object], name: str) -> None:
        lists = op.build()
        raises(ValueError, f"^{name}: ", lambda: op(lists, **changes), lists)

    @pytest.mark.parametrize("op", _BOTH, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "step", "betas"])
    @pytest.mark.parametrize("value", ["0.1", None, [0.1], 1j], ids=repr)
    def test_no_number(self, op: Op, name: str, value: object) -> None:
        lists = op.build()
        error = (TypeError, ValueError) if name == "betas" else TypeError
        raises(error, rf"^{name}", lambda: op(lists, **{name: value}), lists)

    @pytest.mark.parametrize("op", _BOTH, ids=lambda op: op.name)
    @pytest.mark.parametrize("name", ["lr", "step"])
    def test_missing(self, op: Op, name: str) -> None:
        lists = op.build()
        arguments = {k: v for k, v in op.scalars if k != name}
        raises(TypeError, name, lambda: op.call(**lists, **arguments), lists)

    @pytest.mark.parametrize("name", ["momentum_decay", "mu_product"])
    @pytest.mark.parametrize("value", [-0.1, NAN, math.inf])
    def test_of_nadam(self, name: str, value: float) -> None:
        op = BY_NAME["adam_step_"]
        lists = op.build()
        options = {"momentum_decay": 4e-3, "mu_product": 0.5, name: value}
        raises(ValueError, rf"^{name}: ", lambda: op(lists, **options), lists)

    def test_nadam_without_its_product(self) -> None:
        """The default of 1 would divide by zero."""
        op = BY_NAME["adam_step_"]
        lists = op.build()
        raises(ValueError, "^mu_product", lambda: op(lists, momentum_decay=4e-3), lists)

    @pytest.mark.parametrize("steps", [-1.0, NAN, math.inf, laws.Geometric(0.5)], ids=str)
    def test_of_a_prediction_in_the_step(self, steps: object) -> None:
        op = BY_NAME["adam_step_"]
        lists = op.build()
        raises(ValueError, r"predict\[1\]|steps", lambda: op(lists, steps=steps), lists)

    @pytest.mark.parametrize(
        "op", [BY_NAME["adam_step_"], BY_NAME["sgd_step_"]], ids=lambda o: o.name
    )
    @pytest.mark.parametrize("bad", [3, (1.0,), (1.0, None, None), ("x", None), None], ids=repr)
    def test_an_entry_of_predict_that_is_no_pair(self, op: Op, bad: object) -> None:
        lists = op.build()
        pairs = [(1.0, lists["predict0"]), bad]
        raises((TypeError, ValueError), r"predict\[1\]", lambda: op(lists, predict=pairs), lists)

    @pytest.mark.parametrize(
        "op", [BY_NAME["adam_step_"], BY_NAME["sgd_step_"]], ids=lambda o: o.name
    )
    @pytest.mark.parametrize(
        "bad", [None, "x", [1.0], object()], ids=["None", "x", "list", "object"]
    )
    def test_an_output_without_a_horizon(self, op: Op, bad: object) -> None:
        """Only a Plan's None skips an output; here it would be requested but not written."""
        lists = op.build()
        pairs = [(1.0, lists["predict0"]), (bad, lists["predict1"])]
        raises(TypeError, r"predict\[1\]", lambda: op(lists, predict=pairs), lists)

    def test_also_when_there_is_nothing_to_do(self) -> None:
        for op in self._BOTH:
            empty: Lists = {n: [] for n in op.lists}
            op(empty)
            with pytest.raises(ValueError, match="betas"):
                op(empty, betas=(0.9, 1.0))


class TestNumbersThatAreNotNeeded:
    """An invalid number is rejected even if the law does not use it."""

    @pytest.mark.parametrize("changes", [{"momentum": NAN}, {"weight_decay": -1.0}], ids=str)
    @pytest.mark.parametrize("name", ["predict_", "predict", "stash_predict_"])
    def test_of_the_linear_law(self, name: str, changes: dict[str, float]) -> None:
        op = BY_NAME[name]
        lists = op.build()
        (argument,) = changes
        raises(ValueError, f"^{argument}: ", lambda: op(lists, **changes), lists)


class TestPlanRefresh:
    """A refresh validates gradients like the constructor, and keeps the old ones on an error."""

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (torch.ones(3, 4), ValueError),
            (torch.ones(3, 4).t(), ValueError),
            (torch.ones(SHAPE, dtype=torch.float64), ValueError),
            (torch.ones(SHAPE, dtype=torch.int32), TypeError),
            (torch.empty(SHAPE, device="meta"), TypeError),
            (torch.eye(*SHAPE).to_sparse(), TypeError),
            (torch.ones(1, 3).expand(SHAPE), ValueError),
            ("gradient", TypeError),
        ],
        ids=["shape", "strides", "float64", "int32", "meta", "sparse", "expanded", "string"],
    )
    def test_bad_gradients(self, bad: object, error: type[Exception]) -> None:
        w = [torch.zeros(SHAPE) for _ in range(COUNT)]
        plan = st.Plan(w, grads=[torch.ones(SHAPE) for _ in range(COUNT)])
        grads: list[object] = [torch.full(SHAPE, 7.0) for _ in range(COUNT)]
        grads[BAD] = bad
        raises(error, r"grads\[3\]", lambda: plan.refresh(grads), w)  # type: ignore[arg-type]
        plan.sgd_step_(lr=1.0, momentum=0.0)
        assert all(bool((t == -1.0).all()) for t in w)

    def test_a_gradient_that_overlaps_what_is_written(self) -> None:
        w = [torch.zeros(SHAPE) for _ in range(COUNT)]
        plan = st.Plan(w, grads=[torch.ones(SHAPE) for _ in range(COUNT)])
        grads = [torch.ones(SHAPE) for _ in range(COUNT)]
        grads[1] = w[BAD]
        raises(ValueError, r"grads\[1\]|params\[3\]", lambda: plan.refresh(grads), (w, grads))

    def test_sparse_gradients_of_an_embedding(self) -> None:
        table = torch.nn.Embedding(4, 3, sparse=True)
        plan = st.Plan(list(table.parameters()))
        table(torch.tensor([1, 2])).sum().backward()
        raises(TypeError, r"grads\[0\]", lambda: plan.refresh(), list(table.parameters()), "sparse")
