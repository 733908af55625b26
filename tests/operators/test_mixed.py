"""Tests float32 master weights and state with 16-bit gradients and outputs."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import hypothesis.strategies as hs
import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.bad_input import raises
from helpers.ops_rules import Adam, predict_adam, predict_sgd
from helpers.ops_tensors import KINDS, SIZES, Guarded, check_guards, contiguous, tensors, values
from hypothesis import given
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws
from spectrain_ext.operators import numbers

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: (gradients, outputs) for float32 weights and state.
PAIRS = [(BF16, BF16), (F16, F16), (F32, BF16), (F32, F16), (BF16, F32), (F16, F32), (F32, F32)]
_NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16"}


def _id(dtypes: tuple[torch.dtype, ...]) -> str:
    return "-".join(_NAMES[d] for d in dtypes)


def lists(
    seed: int,
    kind: str,
    sizes: list[int],
    dtypes: list[list[torch.dtype]],
    offsets: list[int],
) -> list[list[Guarded]]:
    """Return guarded lists, each with its own dtypes and alignment."""
    return [
        [
            Guarded(contiguous(n).at(offsets[k % len(offsets)]), dtype).filled(
                values(np.random.default_rng([seed, k, i]), kind, n, dtype)
            )
            for i, (n, dtype) in enumerate(zip(sizes, of_list, strict=True))
        ]
        for k, of_list in enumerate(dtypes)
    ]


@hs.composite
def mixtures(draw: hs.DrawFn) -> tuple[list[list[Guarded]], list[bool]]:
    """Draw W, g, two states and three outputs; the types may differ between rows."""
    sizes = draw(hs.lists(hs.sampled_from(SIZES), min_size=1, max_size=5))
    pairs = [draw(hs.sampled_from(PAIRS)) for _ in sizes]
    all32 = [F32] * len(sizes)
    grads, first = [g for g, _ in pairs], [o for _, o in pairs]
    others = [[draw(hs.sampled_from([F32, BF16, F16])) for _ in sizes] for _ in range(2)]
    offsets = draw(hs.one_of(hs.just([0]), hs.lists(hs.integers(0, 9), min_size=1, max_size=7)))
    kind = draw(hs.sampled_from(KINDS))
    built = lists(
        draw(hs.integers(0, 2**32 - 1)),
        kind,
        sizes,
        [all32, grads, all32, all32, first, *others],
        offsets,
    )
    missing = draw(hs.lists(hs.booleans(), min_size=len(sizes), max_size=len(sizes)))
    return built, missing


@given(mixture=mixtures(), steps=hs.sampled_from([0.0, 1.0, 2.5]), smoothed=hs.booleans())
def test_sgd(mixture: tuple[list[list[Guarded]], list[bool]], steps: float, smoothed: bool) -> None:
    """Three outputs of different types in one step, including rows without a gradient."""
    built, missing = mixture
    w, g, v, _, *outs = map(tensors, built)
    grads = [None if gone else t for gone, t in zip(missing, g, strict=True)]
    hyper = ref.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, smoothed=smoothed)
    expected = [hyper.step(*row) for row in zip(w, grads, v, strict=True)]
    chosen: list[laws.Law] = [laws.Linear(steps), laws.Linear(3.0), laws.Geometric(2)]
    given_ = numbers.Sgd(**hyper.keywords())
    st.sgd_step_(w, grads, v, predict=list(zip(chosen, outs, strict=True)), **hyper.keywords())
    ref.assert_lists(w, [x for x, _ in expected], "params")
    ref.assert_lists(v, [x for _, x in expected if x is not None], "momentum_buffers")
    for j, (law, out) in enumerate(zip(chosen, outs, strict=True)):
        for i, o in enumerate(out):
            terms = [] if missing[i] else law.sgd(given_)
            ref.assert_same(o, predict_sgd(terms, w[i], v[i], like=o), f"predict[{j}][{i}]")
    for k, stream in enumerate(built):
        check_guards(**{f"list{k}": stream})


@given(mixture=mixtures(), steps=hs.sampled_from([0.0, 1.0, 2.5]))
def test_adam(mixture: tuple[list[list[Guarded]], list[bool]], steps: float) -> None:
    built, missing = mixture
    w, g, m, u, *outs = map(tensors, built)
    for t in u:
        t.abs_()
    grads = [None if gone else t for gone, t in zip(missing, g, strict=True)]
    hyper = Adam(lr=0.01, step=4, weight_decay=0.1, decoupled_weight_decay=True)
    expected = [hyper.updated(*row) for row in zip(w, grads, m, u, strict=True)]
    chosen: list[laws.Law] = [laws.Linear(steps), laws.Geometric(3), laws.Linear(2.0)]
    options = {k: x for k, x in hyper.keywords().items() if k != "mu_product"}
    st.adam_step_(w, grads, m, u, predict=list(zip(chosen, outs, strict=True)), **options)
    for k, (name, got) in enumerate((("params", w), ("exp_avgs", m), ("exp_avg_sqs", u))):
        ref.assert_lists(got, [e[k] for e in expected], name)
    for j, (law, out) in enumerate(zip(chosen, outs, strict=True)):
        for i, o in enumerate(out):
            terms = [] if missing[i] else law.adam(numbers.Adam(**options))
            expected_out = predict_adam(terms, w[i], m[i], u[i], eps=hyper.eps, like=o)
            ref.assert_same(o, expected_out, f"predict[{j}][{i}]")
    for k, stream in enumerate(built):
        check_guards(**{f"list{k}": stream})


def _good(n: int = 1000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(n), torch.randn(n), torch.randn(n), torch.rand(n)


@pytest.mark.parametrize("dtypes", PAIRS, ids=_id)
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_what_a_step_writes_is_a_later_prediction_rounded(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Directly to a narrow output, and through float32: one rounding, to nearest even."""
    w, g, v, u = _good()
    out, later = torch.empty(1000, dtype=dtypes[1]), torch.empty(1000, dtype=dtypes[1])
    if rule == "sgd":
        st.sgd_step_(w, g.to(dtypes[0]), v, lr=0.1, momentum=0.9, predict=[(3.0, out)])
        st.predict(w, v, lr=0.1, steps=3.0, out=later)
        full = st.predict(w, v, lr=0.1, steps=3.0)
    else:
        law = laws.Geometric(3)
        st.adam_step_(w, g.to(dtypes[0]), v, u, lr=0.1, step=2, predict=[(law, out)])
        st.adam_predict(w, v, u, lr=0.1, step=2, steps=law, out=later)
        full = st.adam_predict(w, v, u, lr=0.1, step=2, steps=law)
    ref.assert_bits(out, later, "a later predict")
    ref.assert_bits(out, full.to(dtypes[1]), "rounded by torch")


@pytest.mark.parametrize("gradient", [BF16, F16], ids=str)
@pytest.mark.parametrize("rule", ["plain", "sgd", "nesterov", "adam"])
def test_a_narrow_gradient_is_the_float32_number_it_stands_for(
    rule: str, gradient: torch.dtype
) -> None:
    results = []
    start = _good()
    narrow = start[1].to(gradient)
    for g in (narrow, narrow.float()):
        w, _, v, u = (t.clone() for t in start)
        if rule == "adam":
            st.adam_step_(w, g, v, u, lr=0.1, step=1, weight_decay=0.1)
        elif rule == "plain":
            st.sgd_step_(w, g, None, lr=0.1, momentum=0.0, weight_decay=0.1)
        else:
            st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, nesterov=rule == "nesterov")
        results.append([w, v, u])
    ref.assert_lists(results[0], results[1], rule, exact=True)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_outputs_of_three_types_in_one_step(rule: str) -> None:
    """Types that one kernel does not write together need a pass each, with the same bits."""
    w, g, v, u = _good()
    horizon = [1.0, 2.0, 3.0, 4.0, 5.0]
    outs = [torch.empty(1000, dtype=d) for d in (BF16, F32, F16, BF16, F32)]
    plan = st.Plan(w, exp_avgs=v, exp_avg_sqs=u, grads=g, outs=outs)
    sgd = numbers.Sgd(0.1, 0.9)
    adam = numbers.Adam(0.1, (0.9, 0.99), 1e-8, 0.0, 3)
    chosen: list[Any] = [sgd] if rule == "sgd" else [adam]
    if rule == "sgd":
        plan.sgd_step_([sgd], predict=horizon)
    else:
        plan.adam_step_([adam], predict=horizon)
    assert plan._native.last_launch()[0] <= 4
    written = [t.clone() for t in outs]
    for j, s in enumerate(horizon):
        plan.predict(chosen, steps=s, out=j)
    ref.assert_lists(outs, written, "outs", exact=True)


def test_a_mixed_precision_training_loop() -> None:
    """The step writes bfloat16 working weights; the master keeps what they lose."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 1).bfloat16()
    params = list(layer.parameters())
    master = [p.detach().float() for p in params]
    state = [torch.zeros_like(t) for t in master]
    plan = st.Plan(
        master,
        momentum_buffers=state,
        grads=[torch.zeros_like(p) for p in params],
        outs=[[p.detach() for p in params]],
    )
    expected, expected_v = [t.clone() for t in master], [t.clone() for t in state]
    hyper = ref.SGD(lr=1e-4, momentum=0.9)
    for i in range(20):
        layer.zero_grad(set_to_none=True)
        layer(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
        grads = [p.grad for p in params]
        assert all(g is not None and g.dtype == BF16 for g in grads)
        plan.refresh(grads)
        plan.sgd_step_(lr=1e-4, momentum=0.9, first_step=i == 0, predict=[2.0])
        for k, g in enumerate(grads):
            new, new_v = hyper.step(expected[k], g, expected_v[k], first=i == 0)
            assert new_v is not None
            expected[k], expected_v[k] = new, new_v
            hat = ref.predict(new, new_v, lr=1e-4, steps=2.0)
            ref.assert_bits(params[k].detach(), hat.bfloat16(), f"working[{k}], step {i}")
    ref.assert_lists(master, expected, "master")


class TestWriteOut:
    """outs <- W, rounded where an output is narrower."""

    @given(mixture=mixtures(), j=hs.integers(0, 2))
    def test_any_mixture(self, mixture: tuple[list[list[Guarded]], list[bool]], j: int) -> None:
        built, _ = mixture
        w, _, _, _, *outs = map(tensors, built)
        before = [ref.clone(t) for t in w]
        others = [[ref.clone(t) for t in out] for out in outs]
        st.Plan(w, outs=outs).write_out(out=j)
        ref.assert_lists(w, before, "params", exact=True)
        for k, out in enumerate(outs):
            for i, o in enumerate(out):
                if k == j:
                    ref.assert_same(o, w[i].to(o.dtype), f"outs[{k}][{i}]")
                else:
                    ref.assert_bits(o, others[k][i], f"outs[{k}][{i}]")
        for k, stream in enumerate(built):
            check_guards(**{f"list{k}": stream})

    @pytest.mark.parametrize("dtype", [F32, torch.float64, F16, BF16], ids=str)
    def test_bits_where_nothing_is_rounded(self, dtype: torch.dtype) -> None:
        w = values(np.random.default_rng(0), "bits", 999, dtype)
        out = torch.zeros_like(w)
        st.Plan(w, outs=[out]).write_out()
        ref.assert_bits(out, w, "out")

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
    @pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
    def test_rounding_of_every_kind_of_number(self, dtype: torch.dtype, device: str) -> None:
        """To nearest, ties to even: halfway cases of every result, overflow, subnormals."""
        exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
        exact = exact[exact.isfinite()].sort().values
        halfway = (exact[1:].double() + exact[:-1].double()).div(2).float()
        up = torch.nextafter(halfway, torch.tensor(torch.inf))
        down = torch.nextafter(halfway, torch.tensor(-torch.inf))
        large = torch.tensor([65519.0, 65520.0, 65535.0, 3e38, -3e38, 1e-45, -1e-45])
        w = torch.cat([exact, halfway, up, down, large, -large])
        out = torch.empty(len(w), dtype=dtype, device=device)
        st.Plan(w.to(device), outs=[out]).write_out()
        ref.assert_same(out.cpu(), w.to(dtype), "out")

    @pytest.mark.parametrize("steps", [0, 1e-320])
    def test_a_prediction_that_does_not_move(self, steps: float) -> None:
        """Outputs whose types differ from tensor to tensor: norms stay in float32."""
        w, v = [torch.randn(9), torch.randn(9)], [torch.ones(9), torch.ones(9)]
        out = [torch.empty(9, dtype=BF16), torch.empty(9)]
        plan = st.Plan(w, momentum_buffers=v, outs=[out])
        plan.predict(lr=0.1, steps=steps)
        ref.assert_lists(out, [w[0].bfloat16(), w[1]], "out", exact=True)


class TestUnsupported:
    """Types that no kernel supports together: the error names the tensor, and nothing changes."""

    _BAD: ClassVar = [(BF16, F16), (F16, BF16)]

    @pytest.mark.parametrize("dtypes", _BAD, ids=_id)
    @pytest.mark.parametrize("rule", ["sgd", "adam"])
    def test_gradient_of_one_and_output_of_the_other_16_bit_type(
        self, rule: str, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        w, g, v, u = ([torch.rand(5) for _ in range(3)] for _ in range(4))
        out = [torch.zeros(5), torch.zeros(5), torch.zeros(5, dtype=dtypes[1])]
        g[2] = g[2].to(dtypes[0])
        calls = {
            "sgd": lambda: st.sgd_step_(w, g, v, lr=0.1, momentum=0.9, predict=[(1.0, out)]),
            "adam": lambda: st.adam_step_(w, g, v, u, lr=0.1, step=1, predict=[(1.0, out)]),
        }
        says = (_NAMES[dtypes[0]], _NAMES[dtypes[1]])
        raises(ValueError, r"params\[2\]", calls[rule], (w, g, v, u, out), *says)

    @pytest.mark.parametrize("missing", [False, True])
    def test_of_a_later_pass_is_found_before_the_step(self, missing: bool) -> None:
        """For any types of several outputs, the call works completely or changes nothing."""
        kinds = [F32, BF16, F16]
        for g_type, *out_types in itertools.product(kinds, repeat=4):
            w, g, v, _ = ([t, t.clone()] for t in _good(5))
            grads: list[Tensor | None] = [g[0].to(g_type), None if missing else g[1]]
            outs = [[torch.zeros(5, dtype=d), torch.zeros(5)] for d in out_types]
            kept = [t.clone() for t in (*w, *v)]
            try:
                st.sgd_step_(
                    w, grads, v, lr=0.1, momentum=0.9, predict=[(2.0, out) for out in outs]
                )
            except ValueError as error:
                assert "params[0]" in str(error)
                ref.assert_lists([*w, *v], kept, str(error), exact=True)
                assert not any(bool(t.any()) for out in outs for t in out)
            else:
                for out in outs:
                    for i, o in enumerate(out):
                        steps = 2.0 if grads[i] is not None else 0.0
                        hat = ref.predict(w[i], v[i], lr=0.1, steps=steps)
                        ref.assert_same(o, hat.to(o.dtype), f"{g_type}, {out_types}")

    @pytest.mark.parametrize("name", ["exp_avgs", "exp_avg_sqs", "momentum_buffers"])
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    def test_narrow_state_beside_float32_weights(self, name: str, dtype: torch.dtype) -> None:
        w = [torch.ones(4), torch.ones(4)]
        state = {"exp_avgs": list(w), "exp_avg_sqs": [torch.ones(4), torch.ones(4)]}
        if name == "momentum_buffers":
            state = {}
        state[name] = [torch.ones(4), torch.ones(4, dtype=dtype)]
        if "exp_avgs" in state and name != "exp_avgs":
            state["exp_avgs"] = [torch.ones(4), torch.ones(4)]
        raises(
            ValueError, rf"{name}\[1\]", lambda: st.Plan(w, **state), w, "float32", _NAMES[dtype]
        )  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["grads", "outs"])
    def test_wide_gradients_and_outputs_beside_16_bit_weights(self, name: str) -> None:
        w = [torch.ones(4, dtype=BF16)]
        wrong: dict[str, Any] = {name: [torch.ones(4)] if name == "grads" else [[torch.ones(4)]]}
        raises(ValueError, name, lambda: st.Plan(w, **wrong), w, "bfloat16", "float32")

    def test_extrapolation_into_a_narrower_type(self) -> None:
        w, kept = torch.randn(4), torch.randn(4)
        out = torch.zeros(4, dtype=BF16)
        try:
            st.extrapolate(w, kept, steps=2.0, out=out)
        except ValueError as error:
            assert "params" in str(error) and not bool(out.any())
        else:
            ref.assert_same(out, st.extrapolate(w, kept, steps=2.0).bfloat16(), "out")
