"""Tests learning rates in memory, which the kernel reads: the bits of plain numbers, and errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import Geometric, SecondOrder
from spectrain_ext.operators.numbers import Adam, Rate, Sgd

RATES = some.floats(1e-6, 1.0)
MOMENTA = some.floats(0.05, 0.999)
HORIZONS = some.floats(0.25, 40.0)
DECAYS = some.sampled_from([0.0, 1e-4, 0.1])


def in_memory(value: float, dtype: torch.dtype = torch.float64) -> Any:
    """Return a learning rate as a CUDA tensor would be taken, in memory of the CPU."""
    return Rate(torch.tensor(value, dtype=dtype))


def tensors(n: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Return W and n positive lists of two tensors; float64 shows a coefficient's bits."""
    random = torch.Generator().manual_seed(7)
    lists = [[torch.randn(9, generator=random), torch.randn(4, 3, generator=random)]]
    for _ in range(n):
        lists.append([torch.rand(t.shape, generator=random) + 0.1 for t in lists[0]])
    return [[t.to(dtype) for t in some_list] for some_list in lists]


def outcome(call: Callable[[st.Plan, Any], None], rate: Callable[[float], Any]) -> list[Tensor]:
    """Return all lists after a plan's call with learning rates made by `rate`."""
    w, g, v, first, second = tensors(4)
    call(st.Plan(w, grads=g, momentum_buffers=v, outs=[first, second]), rate)
    return [*w, *v, *first, *second]


def assert_same_bits(call: Callable[[st.Plan, Any], None]) -> None:
    """Plain numbers and those in memory give the same bits of every float64 result."""
    plain = outcome(call, float)
    w, _, v, first, second = tensors(4)
    assert not all(map(torch.equal, plain, [*w, *v, *first, *second]))
    for a, b in zip(plain, outcome(call, in_memory), strict=True):
        assert torch.equal(a.view(torch.int64), b.view(torch.int64))


class TestTheBitsOfPlainNumbers:
    """A coefficient a + b*lr has the same bits next to the kernel and in Python."""

    @given(lr=RATES, mu=MOMENTA, decay=DECAYS, steps=HORIZONS, kind=some.integers(0, 4))
    def test_sgd_step(self, lr: float, mu: float, decay: float, steps: float, kind: int) -> None:
        flags = [{}, {"nesterov": True}, {"smoothed": True}, {"decoupled_weight_decay": True},
                 {"nesterov": True, "decoupled_weight_decay": True}][kind]  # fmt: skip

        def call(plan: st.Plan, rate: Any) -> None:
            numbers = {"lr": rate(lr), "momentum": mu, "weight_decay": decay}
            plan.sgd_step_(**numbers, **flags, predict=[steps, SecondOrder(2.5, steps)])

        assert_same_bits(call)

    @given(lr=RATES, decay=DECAYS, decoupled=some.booleans())
    def test_without_momentum(self, lr: float, decay: float, decoupled: bool) -> None:
        def call(plan: st.Plan, rate: Any) -> None:
            numbers = {"weight_decay": decay, "decoupled_weight_decay": decoupled}
            plan.sgd_step_(lr=rate(lr), momentum=0.0, **numbers)

        assert_same_bits(call)

    @given(lr=RATES, mu=MOMENTA, steps=HORIZONS)
    def test_predictions(self, lr: float, mu: float, steps: float) -> None:
        def call(plan: st.Plan, rate: Any) -> None:
            plan.predict(lr=rate(lr), steps=steps)
            plan.predict(lr=rate(lr), momentum=mu, steps=Geometric(steps), out=1)
            plan.predict_(lr=rate(lr), steps=steps)

        assert_same_bits(call)

    @given(lr=RATES, mu=MOMENTA, steps=HORIZONS)
    def test_a_law_that_multiplies_twice(self, lr: float, mu: float, steps: float) -> None:
        """In another order, so that the last bit of a double may differ."""
        w, v = tensors(1)
        numbers = {"momentum": mu, "nesterov": True, "steps": Geometric(steps)}
        read = st.predict(w, v, lr=in_memory(lr), **numbers)
        torch.testing.assert_close(read, st.predict(w, v, lr=lr, **numbers), rtol=1e-14, atol=1e-13)

    @given(lr=RATES, steps=HORIZONS)
    def test_operators(self, lr: float, steps: float) -> None:
        w, v, kept = tensors(2)
        other = [t.clone() for t in w]
        st.stash_predict_(w, kept, v, lr=in_memory(lr), steps=steps)
        st.predict_(other, v, lr=lr, steps=steps)
        assert all(map(torch.equal, w, other))

    def test_groups_have_rates_of_their_own(self) -> None:
        def made(rate: Any) -> list[Tensor]:
            w, g, v, first, second = tensors(4)
            plan = st.Plan(w, grads=g, momentum_buffers=v, outs=[first, second], groups=[1, 0])
            plan.sgd_step_([Sgd(rate(0.1), 0.9), Sgd(0.2, 0.5)], predict=[2, 3.0])
            plan.predict_([Sgd(rate(0.1), 0.9), Sgd(rate(0.2), 0.5)], steps=(2, 3.0))
            return [*w, *v, *first, *second]

        assert all(map(torch.equal, made(float), made(in_memory)))

    def test_more_outputs_than_one_kernel_writes(self) -> None:
        w, g, v, *outs = tensors(12)
        plan = st.Plan(w, grads=g, momentum_buffers=v, outs=outs)
        plan.sgd_step_(lr=in_memory(0.1), momentum=0.9, predict=list(range(10)))
        for j, out in enumerate(outs):
            assert all(map(torch.equal, out, st.predict(w, v, lr=0.1, steps=j)))

    def test_a_horizon_of_zero_keeps_the_bits(self) -> None:
        w, v, out = tensors(2)
        v[0].fill_(float("inf"))
        for lr, steps in ((in_memory(0.1), 0), (in_memory(0.0), 2)):
            st.predict(w, v, lr=lr, steps=steps, out=out)
            assert all(map(torch.equal, w, out))


class TestReadWhenTheCallRuns:
    """What a captured graph does at a replay: the same native call with the rate of the moment."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_changed_tensor_changes_the_next_call(self, dtype: torch.dtype) -> None:
        w, v, out = tensors(2)
        lr = torch.tensor(0.5, dtype=dtype)
        plan = st.Plan(w, momentum_buffers=v, outs=[out])
        for rate in (0.5, 0.3, 0.0):
            lr.fill_(rate)
            plan.predict(lr=Rate(lr), steps=3)
            assert all(map(torch.equal, out, st.predict(w, v, lr=lr.item(), steps=3)))

    def test_a_prepared_call(self) -> None:
        w, g, v, out = tensors(3)
        others = [[t.clone() for t in some_list] for some_list in (w, v, out)]
        lr = torch.tensor(0.5, dtype=torch.float64)
        native = st.Plan(w, grads=g, momentum_buffers=v, outs=[out])._native
        group = Sgd(Rate(lr), 0.75, weight_decay=0.125, decoupled_weight_decay=True)
        terms = [(0, [[st.laws.Term(1.0, group.lr * 2.0).split()]])]
        step = partial(native.sgd_step_, [group.setting()], True, False, terms, {}, None, (lr,))
        for rate in (0.5, 0.3, 0.1):
            lr.fill_(rate)
            step()
            numbers = {"momentum": 0.75, "weight_decay": 0.125, "decoupled_weight_decay": True}
            a, b, c = others
            st.sgd_step_(a, g, b, lr=rate, **numbers, predict=[(2, c)])
            assert all(map(torch.equal, [*w, *v, *out], [*a, *b, *c]))

    def test_a_cpu_tensor_is_read_at_once(self) -> None:
        w, v, out = tensors(2)
        st.predict(w, v, lr=torch.tensor(0.5), steps=torch.tensor([2.0]), out=out)
        assert all(map(torch.equal, out, st.predict(w, v, lr=0.5, steps=2)))
        assert type(Sgd(torch.tensor(0.5), 0.9).lr) is float
        assert type(Adam(torch.tensor(0.5), step=1).lr) is float


class TestErrors:
    """Errors occur before anything is written."""

    @pytest.mark.parametrize(
        ("tensor", "error", "text"),
        [
            (torch.zeros(2), ValueError, "lr: expected one element of float32 or float64, got"),
            (torch.zeros(1, dtype=torch.float16), ValueError, "lr: expected one element of .*16"),
            (torch.zeros(1, dtype=torch.int64), TypeError, "lr: expected float.*, got int64"),
            (torch.zeros(1, device="meta"), TypeError, "lr: expected a dense tensor on a CPU"),
        ],
    )
    def test_no_rate(self, tensor: Tensor, error: type[Exception], text: str) -> None:
        w, v = tensors(1)
        before = [t.clone() for t in w]
        with pytest.raises(error, match=text):
            st.predict_(w, v, lr=Rate(tensor), steps=2)
        assert all(map(torch.equal, w, before))

    def test_a_storage_that_is_gone(self) -> None:
        w, v = tensors(1)
        lr = torch.tensor(0.5)
        lr.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match="lr: has no memory of its own"):
            st.predict_(w, v, lr=Rate(lr), steps=1.0)

    @pytest.mark.parametrize("flags", [{}, {"decoupled_weight_decay": True}, {"nesterov": True}])
    def test_a_law_that_is_not_linear_in_it(self, flags: dict[str, bool]) -> None:
        w, v = tensors(1)
        group = Sgd(in_memory(0.5), 0.9, weight_decay=0.1, **flags)
        with pytest.raises(TypeError, match="lr: expected a number on the host, since this pred"):
            st.Plan(w, momentum_buffers=v).predict_([group], steps=Geometric(3))

    def test_other_numbers(self) -> None:
        w, v = tensors(1)
        with pytest.raises(TypeError, match=r"momentum: expected a number, got .*Rate"):
            st.predict_(w, v, lr=0.1, momentum=in_memory(0.5), steps=2)
        with pytest.raises(TypeError, match=r"lr: expected a number, got .*Rate"):
            Adam(in_memory(0.5), step=1)

    def test_a_second_order_prediction_still_needs_the_step(self) -> None:
        w, v = tensors(1)
        with pytest.raises(ValueError, match="second-order"):
            st.predict_(w, v, lr=in_memory(0.1), momentum=0.9, steps=SecondOrder(2.0))


def test_an_optimizer_hands_it_on() -> None:
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
    rate = torch.tensor(0.5)
    ours = st.optim.SGD([p], lr=0.5, momentum=0.9)
    plain = st.optim.SGD([q], lr=0.5, momentum=0.9)
    ours.param_groups[0]["lr"] = Rate(rate)
    for value in (0.5, 0.25):
        rate.fill_(value)
        plain.param_groups[0]["lr"] = value
        for parameter, optimizer in ((p, ours), (q, plain)):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert torch.equal(p, q)
