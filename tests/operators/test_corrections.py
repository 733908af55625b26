"""Tests steps corrected by stale weights: exact bits and errors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_corrections import Correction, along, averaged, corrected, way
from helpers.ops_rules import Adam, predict_adam, predict_sgd
from helpers.ops_tensors import KINDS, Guarded, check_guards, contiguous, tensors, values
from torch import Tensor

import spectrain_ext as st
from spectrain_ext import laws
from spectrain_ext.operators import numbers
from spectrain_ext.operators.corrections import DelayCompensation, GapAware

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
#: (weights and state, gradients and stale weights).
PAIRS = [(F32, F32), (F64, F64), (F32, BF16), (F32, F16)]
#: Several blocks and chunks, heads and tails, and no elements.
SIZES = [0, 1, 7, 33, 300, 4099]
CORRECTIONS = [DelayCompensation(0.3), GapAware(), GapAware(0.5)]
SGDS = [
    ref.SGD(0.1, 0.9),
    ref.SGD(0.1, 0.9, weight_decay=0.01, nesterov=True),
    ref.SGD(0.1, 0.9, dampening=0.3, weight_decay=0.01, maximize=True),
    ref.SGD(0.1, 0.9, weight_decay=0.01, decoupled_weight_decay=True, ema=True),
    ref.SGD(0.1, 0.0, weight_decay=0.01),
]
ADAMS = [
    Adam(0.01, 4, weight_decay=0.1),
    Adam(0.01, 4, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    Adam(0.01, 4, momentum_decay=4e-3).at(4),
]
every_correction = pytest.mark.parametrize("correction", CORRECTIONS, ids=str)


def _lists(kind: str, pair: tuple[torch.dtype, torch.dtype], offset: int) -> list[list[Guarded]]:
    """Return W, g, v, u, A, W_stale and an output; some weights have not changed."""
    wide, narrow = pair
    lists = [
        [
            Guarded(contiguous(n).at(offset * k % 7), dtype).filled(
                values(np.random.default_rng([k, i]), kind, n, dtype)
            )
            for i, n in enumerate(SIZES)
        ]
        for k, dtype in enumerate([wide, narrow, wide, wide, wide, narrow, narrow])
    ]
    for t in (*tensors(lists[3]), *tensors(lists[4])):
        t.abs_()
    for w, stale in zip(tensors(lists[0]), tensors(lists[5]), strict=True):
        w[::3] = stale[::3].to(wide)
    return lists


@pytest.mark.parametrize(
    ("kind", "offset", "pair"),
    [
        *(("normal", 0, pair) for pair in [(F64, F64), (F32, F16)]),
        *(("special", 3, pair) for pair in [(F32, F32), (F32, BF16)]),
    ],
    ids=lambda of: "-".join(str(d)[6:] for d in of) if isinstance(of, tuple) else str(of),
)
@every_correction
class TestBits:
    """Every element has the bits of exact arithmetic, also if the stale weights are an output."""

    @pytest.mark.parametrize("hyper", SGDS, ids=lambda h: f"{h.momentum}-{h.nesterov}-{h.ema}")
    def test_sgd(
        self, correction: Correction, kind: str, pair: Any, offset: int, hyper: ref.SGD
    ) -> None:
        built = _lists(kind, pair, offset)
        w, g, v, _, average, stale, more = map(tensors, built)
        told: dict[str, Any] = {"largest_lr": 0.25, "averaged": 5}
        grads = [None if i == 3 else t for i, t in enumerate(g)]
        expected = []
        for i, grad in enumerate(grads):
            if grad is None:
                expected.append((ref.clone(w[i]), ref.clone(v[i]), ref.clone(average[i]), None))
                continue
            d = corrected(correction, hyper, grad, w[i], stale[i], average[i], **told)
            new_w, new_v = along(hyper, d).step(w[i], grad, v[i])
            step = d if hyper.momentum == 0 else ref.widen(new_v)
            gap = isinstance(correction, GapAware)
            new_a = averaged(correction, average[i], step) if gap else ref.clone(average[i])
            expected.append((new_w, new_v, new_a, d))
        chosen: list[Any] = [] if hyper.momentum == 0 else [laws.Linear(2.0), laws.Geometric(3)]
        outs = list(zip(chosen, (stale, more), strict=False))
        kept = [ref.clone(t) for t in stale]
        lists: dict[str, Any] = {"stale": stale, "gap_averages": average}
        st.sgd_step_(
            w, grads, v, predict=outs, correction=correction, **lists, **told, **hyper.keywords()
        )
        ref.assert_lists(w, [e[0] for e in expected], "params")
        ref.assert_lists(v, [e[1] for e in expected], "momentum_buffers")
        ref.assert_lists(average, [e[2] for e in expected], "gap_averages")
        if not chosen:
            ref.assert_lists(stale, kept, "stale", exact=True)
        for law, out in outs:
            for i, o in enumerate(out):
                terms = [] if grads[i] is None else law.sgd(numbers.Sgd(**hyper.keywords()))
                ref.assert_same(o, predict_sgd(terms, w[i], v[i], like=o), f"{law}[{i}]")
        check_guards(**{f"list{k}": stream for k, stream in enumerate(built)})

    @pytest.mark.parametrize("hyper", ADAMS, ids=lambda h: f"{h.eps}-{h.momentum_decay}")
    def test_adam(
        self, correction: Correction, kind: str, pair: Any, offset: int, hyper: Adam
    ) -> None:
        built = _lists(kind, pair, offset)
        w, g, m, u, average, stale, more = map(tensors, built)
        expected = []
        for i, grad in enumerate(g):
            d = corrected(correction, hyper, grad, w[i], stale[i], average[i], averaged=2)
            new_w, new_m, new_u = along(hyper, d).updated(w[i], grad, m[i], u[i])
            gap = isinstance(correction, GapAware)
            by = way(hyper, new_m, new_u, d)
            new_a = averaged(correction, average[i], by) if gap else ref.clone(average[i])
            expected.append((new_w, new_m, new_u, new_a))
        options = hyper.keywords()
        chosen = [laws.Linear(2.0), laws.Linear(0.0)]
        st.adam_step_(
            *(w, g, m, u),
            predict=list(zip(chosen, (stale, more), strict=True)),
            correction=correction,
            stale=stale,
            gap_averages=average,
            averaged=2,
            **options,
        )
        for k, got in enumerate((w, m, u, average)):
            ref.assert_lists(got, [e[k] for e in expected], f"list {k}")
        for law, out in zip(chosen, (stale, more), strict=True):
            terms = law.adam(numbers.Adam(**options))
            for i, o in enumerate(out):
                expected_out = predict_adam(terms, w[i], m[i], u[i], eps=hyper.eps, like=o)
                ref.assert_same(o, expected_out, f"{law}[{i}]")
        check_guards(**{f"list{k}": stream for k, stream in enumerate(built)})


def _random(n: int = 300, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    names = ("w", "g", "v", "u", "average", "stale", "out")
    rows = {name: torch.randn(n, dtype=dtype) for name in names}
    rows["average"].square_()
    rows["u"].square_()
    return rows


class TestDefinition:
    """The papers' formulas, in plain float64."""

    def test_delay_compensation(self) -> None:
        r = _random()
        w, g, gap = r["w"].clone(), r["g"], r["w"] - r["stale"]
        d = g + 0.3 * g * g * gap + 0.01 * w
        st.sgd_step_(
            *(r["w"], g, None),
            **{"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01, "stale": r["stale"]},
            correction=DelayCompensation(0.3),
        )
        torch.testing.assert_close(r["w"], w - 0.1 * d, rtol=1e-13, atol=1e-14)

    def test_gap_aware(self) -> None:
        """Several steps from zero: the average covers earlier steps, the rate is the largest."""
        w = torch.randn(50, dtype=F64)
        v, average = torch.zeros_like(w), torch.zeros_like(w)
        ours = w.clone(), v.clone(), average.clone()
        for step, (lr, largest) in enumerate([(0.1, 0.1), (0.2, 0.2), (0.05, 0.2), (0.05, 0.2)]):
            g, stale = torch.randn_like(w), ours[0] + 0.1 * torch.randn_like(w)
            st.sgd_step_(
                *(ours[0], g, ours[1]),
                **{"lr": lr, "momentum": 0.9, "weight_decay": 0.01, "stale": stale},
                correction=GapAware(0.99),
                gap_averages=ours[2],
                averaged=step,
                largest_lr=largest,
            )
            penalty = torch.ones_like(w)
            if step:
                usual = largest * ((average / (1 - 0.99**step)).sqrt() + 1e-8)
                penalty += (w - stale).abs() / usual
            v = 0.9 * v + g / penalty + 0.01 * w / penalty
            w = w - lr * v
            average = 0.99 * average + 0.01 * v * v
            for got, expected in zip(ours, (w, v, average), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)

    def test_gap_aware_adam(self) -> None:
        r = _random()
        w, m, u, average = (r[name].clone() for name in ("w", "v", "u", "average"))
        penalty = 1 + (w - r["stale"]).abs() / ((average / (1 - 0.9**3)).sqrt() + 1e-8)
        d = (r["g"] + 0.01 * w) / penalty
        m, u = 0.9 * m + 0.1 * d, 0.999 * u + 0.001 * d * d
        step = 0.1 * m / (1 - 0.9**7) / ((u / (1 - 0.999**7)).sqrt() + 1e-8)
        st.adam_step_(
            *(r["w"], r["g"], r["v"], r["u"]),
            **{"lr": 0.1, "step": 7, "weight_decay": 0.01, "stale": r["stale"], "averaged": 3},
            correction=GapAware(0.9),
            gap_averages=r["average"],
        )
        torch.testing.assert_close(r["w"], w - step, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(r["average"], 0.9 * average + 0.1 * step**2)

    def test_factors_come_first(self) -> None:
        """Gradients are unscaled and clipped, then corrected."""
        r = _random(dtype=F32)
        w = r["w"].clone()
        options = {"lr": 0.1, "momentum": 0.0, "stale": r["stale"]}
        by: Any = {"grad_scale": torch.tensor(8.0), "clip_factor": torch.tensor(0.5)}
        st.sgd_step_(r["w"], r["g"], None, correction=DelayCompensation(0.3), **options, **by)
        st.sgd_step_(w, r["g"] / 16, None, correction=DelayCompensation(0.3), **options)
        ref.assert_bits(r["w"], w, "params")

    def test_second_order_prediction_has_the_corrected_direction(self) -> None:
        r = _random()
        w, v = r["w"].clone(), r["v"].clone()
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        law = laws.SecondOrder(2)
        st.sgd_step_(
            *(r["w"], r["g"], r["v"]),
            **{**options, "stale": r["stale"], "predict": [(law, r["out"])]},
            correction=DelayCompensation(0.3),
        )
        d = r["g"] + 0.3 * r["g"] ** 2 * (w - r["stale"])
        out = torch.empty_like(w)
        st.sgd_step_(w, d, v, predict=[(law, out)], **options)
        torch.testing.assert_close(r["out"], out, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d)[6:] for d in pair))
class TestIdentity:
    """A correction without effect has the plain step's bits."""

    @pytest.mark.parametrize("correction", [DelayCompensation(0.0), GapAware()], ids=str)
    @pytest.mark.parametrize("kind", ["special", "wide"])
    def test_no_strength(self, correction: Correction, kind: str, pair: Any) -> None:
        """Gap-aware has no effect at its first step."""
        w, g, v, _, average, stale, _ = map(tensors, _lists(kind, pair, 1))
        plain = [ref.clone(t) for t in w], [ref.clone(t) for t in v]
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        st.sgd_step_(plain[0], g, plain[1], **options)
        more: Any = {"stale": stale, "gap_averages": average}
        st.sgd_step_(w, g, v, correction=correction, **more, **options)
        ref.assert_lists(w, plain[0], "params")
        ref.assert_lists(v, plain[1], "momentum_buffers")

    @every_correction
    def test_no_gap(self, correction: Correction, pair: Any) -> None:
        w, g, m, u, average, stale, _ = map(tensors, _lists("special", pair, 1))
        for fresh, old in zip(w, stale, strict=True):
            old.nan_to_num_(posinf=math.inf, neginf=-math.inf)
            fresh.copy_(old)
        plain = [[ref.clone(t) for t in column] for column in (w, m, u)]
        options: dict[str, Any] = {"lr": 0.1, "step": 3, "weight_decay": 0.01}
        st.adam_step_(plain[0], g, plain[1], plain[2], **options)
        more: Any = {"stale": stale, "gap_averages": average, "averaged": 2}
        st.adam_step_(w, g, m, u, correction=correction, **more, **options)
        for got, expected in zip((w, m, u), plain, strict=True):
            ref.assert_lists(got, expected, "step")


@every_correction
class TestPlans:
    def test_groups_cuts_and_threads(self, correction: Correction) -> None:
        """One tensor, or pieces of it in two groups: the same bits, with one thread or two."""
        r = _random(200_003, F32)
        cut = [1, 70_001, 130_002]
        options: Any = {"momentum": 0.9, "correction": correction, "averaged": 3}
        results = []
        for pieces, threads in ((1, 1), (1, 2), (4, 2)):
            own = {name: t.clone() for name, t in r.items()}
            lists = {n: [t] if pieces == 1 else t.tensor_split(cut) for n, t in own.items()}
            torch.set_num_threads(threads)
            plan = st.Plan(
                lists["w"],
                momentum_buffers=lists["v"],
                grads=lists["g"],
                stale=lists["stale"],
                outs=[lists["stale"]],
                gap_averages=lists["average"],
                groups=[i % 2 for i in range(len(lists["w"]))] if pieces > 1 else None,
            )
            for _ in range(2):
                if pieces == 1:
                    plan.sgd_step_(lr=0.1, predict=[2.0], largest_lr=0.4, **options)
                else:
                    group = numbers.Sgd(0.1, options["momentum"])
                    more = {k: o for k, o in options.items() if k != "momentum"}
                    plan.sgd_step_([group] * 2, predict=[2.0], largest_lr=0.4, **more)
            results.append(own)
        torch.set_num_threads(1)
        for other in results[1:]:
            for name, t in other.items():
                ref.assert_bits(t, results[0][name], name)

    def test_a_skipped_step(self, correction: Correction) -> None:
        r = _random(100, F32)
        before = {name: t.clone() for name, t in r.items()}
        st.sgd_step_(
            *(r["w"], r["g"], r["v"]),
            **{"lr": 0.1, "momentum": 0.9, "averaged": 1, "predict": [(1, r["stale"])]},
            correction=correction,
            stale=r["stale"],
            gap_averages=r["average"],
            found_inf=torch.tensor(1.0),
        )
        for name, t in r.items():
            ref.assert_bits(t, before[name], name)

    def test_autograd_is_told(self, correction: Correction) -> None:
        r = _random(10)
        versions = {name: t._version for name, t in r.items()}
        st.sgd_step_(
            *(r["w"], r["g"], r["v"]),
            **{"lr": 0.1, "momentum": 0.9, "stale": r["stale"], "gap_averages": r["average"]},
            correction=correction,
        )
        written = {"w", "v", "average"}
        assert {name for name, t in r.items() if t._version > versions[name]} == written


class TestValues:
    def test_are_values(self) -> None:
        assert GapAware() == GapAware(0.999)
        assert len({DelayCompensation(1), DelayCompensation(1.0)}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            GapAware().decay = 0.5  # type: ignore[misc]
        assert st.corrections.GapAware is GapAware

    @pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf, "1", None])
    def test_bad_strength(self, strength: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="strength"):
            DelayCompensation(strength)

    @pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan, "1"])
    def test_bad_decay(self, decay: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="decay"):
            GapAware(decay)


class TestRefusals:
    """Each error names its cause, and nothing is written."""

    @pytest.mark.parametrize(
        ("kind", "words", "change"),
        [
            (ValueError, "stale", {"stale": None}),
            (ValueError, "gap_averages", {"gap_averages": None}),
            (TypeError, "correction: expected", {"correction": 0.3}),
            (TypeError, "correction: expected", {"correction": GapAware}),
            (ValueError, "averaged", {"averaged": -1}),
            (ValueError, "averaged", {"averaged": 1.5}),
            (TypeError, "averaged", {"averaged": "1"}),
            (ValueError, "largest_lr", {"largest_lr": -0.1}),
            (ValueError, "stale: expected shape", {"stale": torch.zeros(3)}),
            (ValueError, "gap_averages: expected float32", {"gap_averages": torch.zeros(8).half()}),
            (ValueError, "stale: expected float32, bfloat16", {"stale": torch.zeros(8).double()}),
            (
                TypeError,
                "largest_lr: needed",
                {"lr": st.Scalar(torch.tensor(0.1)), "largest_lr": None},
            ),
        ],
    )
    def test_arguments(self, kind: type[Exception], words: str, change: dict[str, Any]) -> None:
        w, g, v = torch.ones(8), torch.ones(8), torch.ones(8)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "correction": GapAware()}
        options.update(stale=torch.ones(8), gap_averages=torch.zeros(8), averaged=1)
        with pytest.raises(kind, match=words):
            st.sgd_step_(w, g, v, **{**options, **change})
        assert (w == 1).all()
        assert (v == 1).all()

    def test_16_bit_weights(self) -> None:
        w = torch.ones(8, dtype=BF16)
        with pytest.raises(ValueError, match="float32 and float64"):
            st.sgd_step_(
                *(w, w.clone(), w.clone()),
                **{"lr": 0.1, "momentum": 0.9, "stale": w.clone()},
                correction=DelayCompensation(1),
            )

    def test_overlap(self) -> None:
        """Stale weights may be an output, but not a part of one or of other written lists."""
        w, g, v, memory = torch.ones(8), torch.ones(8), torch.ones(8), torch.ones(16)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        options["correction"] = DelayCompensation(1)
        for stale, out in ((memory[1:9], memory[:8]), (w, memory[:8]), (v, memory[:8])):
            with pytest.raises(ValueError, match="overlap"):
                st.sgd_step_(w, g, v, stale=stale, predict=[(1, out)], **options)
        st.sgd_step_(w, g, v, stale=memory[:8], predict=[(1, memory[:8])], **options)

    @pytest.mark.compiler
    def test_compiled(self) -> None:
        correction = DelayCompensation(1)

        @torch.compile(backend="eager", fullgraph=True)
        def step(w: Tensor, g: Tensor, stale: Tensor) -> None:
            options: dict[str, Any] = {"lr": 0.1, "momentum": 0.0, "stale": stale}
            st.sgd_step_(w, g, None, correction=correction, **options)

        with pytest.raises(Exception, match="a compiled function takes none"):
            step(torch.ones(3), torch.ones(3), torch.ones(3))


@pytest.mark.cuda
@every_correction
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d)[6:] for d in pair))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_bits_of_the_cpu(correction: Correction, pair: Any, kind: str, momentum: float) -> None:
    results: list[list[list[Tensor]]] = []
    for device in ("cpu", "cuda"):
        lists = [[t.to(device) for t in tensors(stream)] for stream in _lists(kind, pair, 1)]
        w, g, v, u, average, stale, _ = lists
        told: dict[str, Any] = {"stale": stale, "gap_averages": average, "averaged": 2}
        told["correction"] = correction
        predict: Any = [(2, stale)] if momentum else []
        options: Any = {"lr": 0.1, "weight_decay": 0.01, "predict": predict}
        st.sgd_step_(w, g, v, momentum=momentum, largest_lr=0.2, **told, **options)
        st.adam_step_(w, g, v, u, step=3, **told, **options)
        results.append([[t.cpu() for t in column] for column in lists])
    for k, (host, gpu) in enumerate(zip(*results, strict=True)):
        ref.assert_lists(gpu, host, f"list {k}")
