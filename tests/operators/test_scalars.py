"""Tests numbers that the kernel reads when it runs: the bits of plain numbers, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import FutureRates, Geometric, Linear, SecondOrder
from spectrain_ext.operators.numbers import Adam, Sgd

RATES = some.floats(1e-6, 1.0)
MOMENTA = some.floats(0.05, 0.999)
HORIZONS = some.floats(0.25, 40.0)
DECAYS = some.sampled_from([0.0, 1e-4, 0.1])
STEPS = some.integers(1, 2**20)


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Any:
    return st.Scalar(torch.tensor(value, dtype=dtype))


def tensors(n: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Return W and n positive lists of two tensors; float64 shows a coefficient's bits."""
    random = torch.Generator().manual_seed(7)
    lists = [[torch.randn(9, generator=random), torch.randn(4, 3, generator=random)]]
    for _ in range(n):
        lists.append([torch.rand(t.shape, generator=random) + 0.1 for t in lists[0]])
    return [[t.to(dtype) for t in some_list] for some_list in lists]


def outcome(call: Callable[[st.Plan, Any], None], convert: Any, *, adam: bool) -> list[Tensor]:
    """Return all lists after a plan's call with numbers made by `convert`."""
    w, g, m, u, first, second = tensors(5)
    if adam:
        plan = st.Plan(w, grads=g, exp_avgs=m, exp_avg_sqs=u, outs=[first, second])
    else:
        plan = st.Plan(w, grads=g, momentum_buffers=m, outs=[first, second])
    call(plan, convert)
    return [*w, *m, *u, *first, *second]


def assert_same_bits(call: Callable[[st.Plan, Any], None], *, adam: bool = False) -> None:
    """Plain numbers and Scalars give the same bits of every float64 result."""
    plain = outcome(call, float, adam=adam)
    read = outcome(call, scalar, adam=adam)
    w, _, m, u, first, second = tensors(5)
    assert not all(map(torch.equal, plain, [*w, *m, *u, *first, *second]))
    for a, b in zip(plain, read, strict=True):
        assert torch.equal(a.view(torch.int64), b.view(torch.int64))


class TestTheBitsOfPlainNumbers:
    """A formula gives the same bits next to the kernel and in Python."""

    @given(lr=RATES, mu=MOMENTA, decay=DECAYS, steps=HORIZONS, kind=some.integers(0, 4))
    def test_sgd_step(self, lr: float, mu: float, decay: float, steps: float, kind: int) -> None:
        flags = [{}, {"nesterov": True}, {"smoothed": True}, {"decoupled_weight_decay": True},
                 {"nesterov": True, "decoupled_weight_decay": True}][kind]  # fmt: skip

        def call(plan: st.Plan, n: Any) -> None:
            numbers = {"lr": n(lr), "momentum": n(mu), "weight_decay": decay}
            plan.sgd_step_(**numbers, **flags, predict=[n(steps), SecondOrder(n(2.5), n(steps))])

        assert_same_bits(call)

    @given(lr=RATES, mu=MOMENTA, steps=some.integers(1, 40), nesterov=some.booleans())
    def test_geometric_of_sgd(self, lr: float, mu: float, steps: int, nesterov: bool) -> None:
        def call(plan: st.Plan, n: Any) -> None:
            numbers = {"lr": n(lr), "momentum": n(mu), "nesterov": nesterov}
            plan.predict(steps=Geometric(n(steps)), **numbers)
            # An L2 penalty needs a known horizon: it fixes how often the matrix is squared.
            plan.predict(steps=Geometric(steps), out=1, weight_decay=0.01, **numbers)

        assert_same_bits(call)

    @given(rates=some.lists(RATES, min_size=1, max_size=12), mu=MOMENTA)
    def test_future_rates(self, rates: list[float], mu: float) -> None:
        def call(plan: st.Plan, n: Any) -> None:
            group = Sgd(n(rates[0]), n(mu), weight_decay=0.01)
            plan.predict([group], steps=FutureRates([n(r) for r in rates]))
            plan.predict([group], steps=FutureRates([n(r) for r in rates], "geometric"), out=1)

        assert_same_bits(call)

    @given(lr=RATES, beta=MOMENTA, decay=DECAYS, step=STEPS, steps=HORIZONS, w=some.booleans())
    def test_adam_step(
        self, lr: float, beta: float, decay: float, step: int, steps: float, w: bool
    ) -> None:
        def call(plan: st.Plan, n: Any) -> None:
            group = Adam(n(lr), (n(beta), 0.999), 1e-8, decay, n(step), w)
            plan.adam_step_([group], predict=[Linear(n(steps)), SecondOrder(n(steps))])
            plan.predict([group], steps=Geometric(5))

        assert_same_bits(call, adam=True)

    @given(lr=RATES, step=STEPS, product=some.floats(0.0, 0.99), steps=some.integers(1, 8))
    def test_nadam(self, lr: float, step: int, product: float, steps: int) -> None:
        def call(plan: st.Plan, n: Any) -> None:
            group = Adam(
                n(lr), (0.9, 0.99), 1e-8, 0.0, n(step),
                momentum_decay=4e-3, mu_product=n(product),
            )  # fmt: skip
            plan.adam_step_([group], predict=[steps, Geometric(steps)])

        assert_same_bits(call, adam=True)

    @given(lr=RATES, steps=HORIZONS)
    def test_the_rest_of_a_plan(self, lr: float, steps: float) -> None:
        w, v, kept, out = tensors(3)
        other = [t.clone() for t in w]
        st.stash_predict_(w, kept, v, lr=scalar(lr), steps=scalar(steps))
        st.predict_(other, v, lr=lr, steps=steps)
        assert all(map(torch.equal, w, other))
        st.extrapolate(w, kept, steps=scalar(steps), out=out)
        assert all(map(torch.equal, out, st.extrapolate(w, kept, steps=steps)))

    def test_groups_have_numbers_of_their_own(self) -> None:
        def call(plan: st.Plan, n: Any) -> None:
            rates = n(0.1), n(0.2)
            plan.sgd_step_([Sgd(rates[0], 0.9), Sgd(rates[1], n(0.5))], predict=[2, n(3.0)])

        def make(convert: Any) -> list[Tensor]:
            w, g, v, first, second = tensors(4)
            outs = [first, second]
            plan = st.Plan(w, grads=g, momentum_buffers=v, outs=outs, groups=[1, 0])
            call(plan, convert)
            return [*w, *v, *first, *second]

        assert all(map(torch.equal, make(float), make(scalar)))

    def test_more_outputs_than_one_kernel_writes(self) -> None:
        """Further kernels predict the rest from the same program."""
        w, g, v, *outs = tensors(12)
        plan = st.Plan(w, grads=g, momentum_buffers=v, outs=outs)
        plan.sgd_step_(lr=scalar(0.1), momentum=0.9, predict=[scalar(j) for j in range(10)])
        for j, out in enumerate(outs):
            assert all(map(torch.equal, out, st.predict(w, v, lr=0.1, steps=j)))


class TestReadWhenTheCallRuns:
    def test_a_changed_tensor_changes_the_next_call(self) -> None:
        w, v, out = tensors(2)
        lr, steps = torch.tensor(0.1), torch.tensor(3)
        plan = st.Plan(w, momentum_buffers=v, outs=[out])
        numbers = {"lr": st.Scalar(lr), "steps": st.Scalar(steps)}
        for rate, horizon in ((0.1, 3), (0.05, 2), (0.05, 0)):
            lr.fill_(rate)
            steps.fill_(horizon)
            plan.predict(**numbers)
            assert all(map(torch.equal, out, st.predict(w, v, lr=lr.item(), steps=horizon)))

    def test_a_horizon_of_zero_keeps_the_bits(self) -> None:
        w, v, out = tensors(2)
        v[0].fill_(float("inf"))
        st.predict(w, v, lr=0.1, steps=scalar(0.0), out=out)
        assert all(map(torch.equal, w, out))

    def test_an_array_of_another_framework_is_a_view(self) -> None:
        w, v, out = tensors(2)
        lr = np.array(0.5)
        number = st.Scalar(lr)
        lr[...] = 0.25
        st.predict(w, v, lr=number, steps=2, out=out)
        assert all(map(torch.equal, out, st.predict(w, v, lr=0.25, steps=2)))

    def test_it_can_be_computed_with(self) -> None:
        w, v, out = tensors(2)
        lr = scalar(0.5)
        number = (2.0 * lr + 1.0 - lr) / 3.0 - (1.0 - 2.0 / (1.0 / lr)) + 0.5**lr * -lr / -lr
        value = (2.0 * 0.5 + 1.0 - 0.5) / 3.0 - (1.0 - 2.0 / (1.0 / 0.5)) + 0.5**0.5
        st.predict(w, v, lr=number, steps=2, out=out)
        assert all(map(torch.equal, out, st.predict(w, v, lr=value, steps=2)))

    def test_a_long_chain_needs_no_recursion(self) -> None:
        w, v, out = tensors(2)
        rates = [scalar(0.001)] * 5000
        st.predict(w, v, lr=0.1, steps=FutureRates(rates), out=out)
        expected = st.predict(w, v, lr=0.1, steps=FutureRates([0.001] * 5000))
        assert all(map(torch.equal, out, expected))

    def test_a_plain_cpu_tensor_is_read_at_once(self) -> None:
        w, v, out = tensors(2)
        st.predict(w, v, lr=torch.tensor(0.5), steps=torch.tensor([2.0]), out=out)
        assert all(map(torch.equal, out, st.predict(w, v, lr=0.5, steps=2)))


class TestErrors:
    """Errors occur before anything is written."""

    @pytest.mark.parametrize(
        ("tensor", "error", "text"),
        [
            (torch.zeros(2), ValueError, "tensor: expected one element, got shape"),
            (torch.zeros(1, dtype=torch.float16), TypeError, "tensor: expected float32, float64"),
            (0.5, TypeError, "tensor: expected an array, got float"),
            (torch.zeros(1, device="meta"), TypeError, "tensor: expected it on the CPU or on CUDA"),
        ],
    )
    def test_what_is_no_scalar(self, tensor: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            st.Scalar(tensor)

    def test_laws_that_need_the_number_of_updates(self) -> None:
        w, g, m, u, out, _ = tensors(5)
        before = [t.clone() for t in w]
        steps = Geometric(scalar(3.0))
        with pytest.raises(TypeError, match=r"steps: expected a number on the host.* under Adam"):
            st.adam_step_(w, g, m, u, lr=0.1, step=1, predict=[(steps, out)])
        with pytest.raises(TypeError, match=r"steps: .* under weight decay"):
            st.predict_(w, m, lr=0.1, momentum=0.9, weight_decay=0.1, steps=steps)
        assert all(map(torch.equal, w, before))

    def test_order_and_value_are_not_known(self) -> None:
        number = scalar(0.5)
        for ask in (float, int, lambda x: x < 1.0, lambda x: x >= 1.0, lambda x: [0][x]):
            with pytest.raises(TypeError, match="needed on the host"):
                ask(number)
        with pytest.raises(TypeError):
            number + "1"

    def test_a_second_order_prediction_still_needs_the_step(self) -> None:
        w, v, _ = tensors(2)
        with pytest.raises(ValueError, match="second-order"):
            st.predict_(w, v, lr=scalar(0.1), momentum=0.9, steps=SecondOrder(2.0))


def test_an_optimizer_hands_a_scalar_on() -> None:
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
    rate = torch.tensor(0.5)
    ours = st.optim.SGD([p], lr=0.5, momentum=0.9)
    plain = st.optim.SGD([q], lr=0.5, momentum=0.9)
    ours.param_groups[0]["lr"] = st.Scalar(rate)
    for value in (0.5, 0.25):
        rate.fill_(value)
        plain.param_groups[0]["lr"] = value
        for parameter, optimizer in ((p, ours), (q, plain)):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert torch.equal(p, q)
