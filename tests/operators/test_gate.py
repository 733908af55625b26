"""Tests a step's scalars on the device: gradient scale, found_inf, clipping factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.numbers import Adam, Sgd

SIZES = (1, 7, 64, 1025, 0, 9000)
Lists = list[list[Tensor]]


def _lists(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Lists:
    generator = torch.Generator().manual_seed(5)
    lists = [[torch.randn(k, generator=generator) for k in SIZES] for _ in range(n)]
    return [[t.abs().to(device, dtype) if j == 3 else t.to(device, dtype) for t in ts]
            for j, ts in enumerate(lists)]  # fmt: skip


def _one(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _copies(lists: Lists) -> Lists:
    return [[t.clone() for t in ts] for ts in lists]


def _bits(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _assert_same_bits(lists: Lists, expected: Lists) -> None:
    for k, (ts, es) in enumerate(zip(lists, expected, strict=True)):
        for i, (t, e) in enumerate(zip(ts, es, strict=True)):
            assert _bits(t) == _bits(e), f"list {k}, tensor {i}"


# Lists are W, g, m, u and one output.


def _sgd(x: Lists, **more: Any) -> None:
    st.sgd_step_(x[0], x[1], x[2], lr=0.1, momentum=0.9, weight_decay=0.01,
                 predict=[(2.0, x[4])], **more)  # fmt: skip


def _sgd_plain(x: Lists, **more: Any) -> None:
    st.sgd_step_(x[0], x[1], None, lr=0.1, momentum=0.0, maximize=True, **more)


def _adam(x: Lists, **more: Any) -> None:
    st.adam_step_(x[0], x[1], x[2], x[3], lr=0.1, step=3, weight_decay=0.01,
                  predict=[(2.0, x[4])], **more)  # fmt: skip


def _sgd_plan(x: Lists, **more: Any) -> None:
    plan = st.Plan(x[0], momentum_buffers=x[2], grads=x[1], outs=[x[4]])
    plan.sgd_step_(lr=0.1, momentum=0.9, predict=[2.0], **more)


def _sgd_groups(x: Lists, **more: Any) -> None:
    groups = [i % 2 for i in range(len(SIZES))]
    plan = st.Plan(x[0], momentum_buffers=x[2], grads=x[1], outs=[x[4]], groups=groups)
    plan.sgd_step_([Sgd(0.1, 0.9), Sgd(0.2, 0.8, maximize=True)], predict=[2.0], **more)


def _adam_plan(x: Lists, **more: Any) -> None:
    plan = st.Plan(x[0], exp_avgs=x[2], exp_avg_sqs=x[3], grads=x[1], outs=[x[4]])
    plan.adam_step_([Adam(0.1, (0.9, 0.99), 1e-8, 0.01, 3)], predict=[2.0], **more)


_STEPS: dict[str, Callable[..., None]] = {
    "sgd": _sgd,
    "sgd_plain": _sgd_plain,
    "adam": _adam,
    "sgd_plan": _sgd_plan,
    "sgd_groups": _sgd_groups,
    "adam_plan": _adam_plan,
}
_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every_step = pytest.mark.parametrize("name", _STEPS)


@every_step
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_power_of_two_is_undone_to_the_bit(name: str, dtype: torch.dtype) -> None:
    plain, scaled = _lists(5, dtype), _lists(5, dtype)
    for g in scaled[1]:
        g.mul_(8.0)
    _STEPS[name](plain)
    _STEPS[name](scaled, grad_scale=_one(32.0), clip_factor=_one(4.0), found_inf=_one(0.0))
    for k in (0, 2, 3, 4):
        _assert_same_bits([scaled[k]], [plain[k]])


@every_step
def test_the_factor_is_made_in_double_and_rounded_once(name: str) -> None:
    """For float64: the quotient of the two float32 numbers, and a product with it."""
    scale, clip = _one(3.7), _one(0.3)
    factor = clip.double().item() / scale.double().item()
    scaled, reference = _lists(5, torch.float64), _lists(5, torch.float64)
    for g in reference[1]:
        g.mul_(factor)
    _STEPS[name](scaled, grad_scale=scale, clip_factor=clip)
    _STEPS[name](reference)
    for k in (0, 2, 3, 4):
        _assert_same_bits([scaled[k]], [reference[k]])


@pytest.mark.parametrize(
    "given", [{"grad_scale": 3.7}, {"clip_factor": 0.3}], ids=["scale", "clip"]
)
def test_against_numpy(given: dict[str, float]) -> None:
    x = _lists(3)
    w, g, v = ([t.double().numpy() for t in ts] for ts in x)
    ((name, value),) = given.items()
    factor = 1 / value if name == "grad_scale" else value
    st.sgd_step_(*x, lr=0.1, momentum=0.9, weight_decay=0.01, **{name: _one(value)})  # type: ignore[arg-type]
    for i in range(len(SIZES)):
        new = 0.9 * v[i] + (factor * g[i] + 0.01 * w[i])
        np.testing.assert_allclose(x[2][i].numpy(), new, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(x[0][i].numpy(), w[i] - 0.1 * new, rtol=1e-5, atol=1e-6)


def test_against_torchs_fused_sgd() -> None:
    x, t = _lists(3), _lists(3)
    torch._fused_sgd_(t[0], t[1], t[2], weight_decay=0.01, momentum=0.9, lr=0.1, dampening=0.0,
                      nesterov=False, maximize=False, is_first_step=False,
                      grad_scale=_one(3.0), found_inf=_one(0.0))  # fmt: skip
    st.sgd_step_(*x, lr=0.1, momentum=0.9, weight_decay=0.01, grad_scale=_one(3.0),
                 found_inf=_one(0.0))  # fmt: skip
    torch.testing.assert_close(x[0], t[0])
    torch.testing.assert_close(x[2], t[2])


@every_step
@pytest.mark.parametrize("found", [1.0, -1.0, float("inf"), float("nan")])
def test_a_skipped_step_writes_nothing(name: str, found: float) -> None:
    x = _lists(5)
    before = _copies(x)
    _STEPS[name](x, found_inf=_one(found), grad_scale=_one(0.0))
    _assert_same_bits(x, before)
    _STEPS[name](x, found_inf=_one(0.0))
    assert not torch.equal(x[0][3], before[0][3])


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_passes_after_the_step_are_skipped_too(rule: str) -> None:
    """Outputs of another dtype, more than one kernel writes, and of rows without a gradient."""
    x = _lists(4)
    grads: list[Tensor | None] = list(x[1])
    grads[1] = None
    dtypes = [torch.float32] * 10 + [torch.bfloat16]
    outs = [[torch.full_like(w, 9.0, dtype=d) for w in x[0]] for d in dtypes]
    before = _copies([*x, *outs])
    predict: Sequence[tuple[float, Any]] = [(float(j % 3), out) for j, out in enumerate(outs)]

    def step(found: float) -> None:
        if rule == "sgd":
            st.sgd_step_(x[0], grads, x[2], lr=0.1, momentum=0.9, predict=predict,
                         found_inf=_one(found))  # fmt: skip
        else:
            st.adam_step_(x[0], grads, x[2], x[3], lr=0.1, step=1, predict=predict,
                          found_inf=_one(found))  # fmt: skip

    step(1.0)
    _assert_same_bits([*x, *outs], before)
    step(0.0)
    for out in outs:
        assert not any((t == 9.0).any() for t in out)


@pytest.mark.parametrize(
    "first", [True, [False, True, False, True, False, True]], ids=["all", "some"]
)
def test_a_skipped_first_step_stays_to_be_made(first: Any) -> None:
    x, reference = _lists(3), _lists(3)
    for found in (1.0, 0.0):
        st.sgd_step_(*x, lr=0.1, momentum=0.9, first_step=first, found_inf=_one(found))
    st.sgd_step_(*reference, lr=0.1, momentum=0.9, first_step=first)
    _assert_same_bits(x, reference)


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a[0],
        lambda a: a.reshape(1, 1),
        torch.from_numpy,
    ],
    ids=["numpy", "numpy scalar view", "two dimensions", "torch"],
)
def test_any_array_of_one_element(make: Callable[[Any], Any]) -> None:
    source = np.full((1,), 2.0, np.float32)
    scale = make(source)
    if isinstance(scale, np.floating):  # a NumPy scalar is not an array
        scale = np.asarray(scale)
    w, g, v = (np.ones(5, np.float32) for _ in range(3))
    st.sgd_step_(w, g, v, lr=1.0, momentum=0.5, grad_scale=scale)
    assert (v == 1.0).all() and (w == 0.0).all()
    assert source[0] == 2.0


def test_each_call_reads_its_own_scalars() -> None:
    w, g, v = (torch.ones(3) for _ in range(3))
    plan = st.Plan(w, momentum_buffers=v, grads=g)
    scale = _one(2.0)
    for expected in (2.0, 4.0):
        v.zero_()
        plan.sgd_step_(lr=0.0, momentum=0.5, grad_scale=scale)
        assert v.tolist() == [1 / expected] * 3
        scale.mul_(2.0)
    v.zero_()
    plan.sgd_step_(lr=0.0, momentum=0.5)
    assert v.tolist() == [1.0] * 3


def test_no_tensors_no_step() -> None:
    st.sgd_step_([], [], [], lr=0.1, momentum=0.9, grad_scale=_one(2.0))


class TestBadInput:
    """Every error names the argument, and nothing changes."""

    @pytest.mark.parametrize("argument", ["grad_scale", "found_inf", "clip_factor"])
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (torch.ones(1, dtype=torch.float64), "one element of float32, got float64"),
            (torch.ones(2), r"one element of float32, got float32 of shape \(2,\)"),
            (torch.ones(0), r"one element of float32, got float32 of shape \(0,\)"),
            (np.ones(1, np.float16), "one element of float32, got float16"),
        ],
        ids=["float64", "two", "none", "float16"],
    )
    def test_not_one_float32(self, argument: str, value: Any, words: str) -> None:
        x = _lists(3)
        before = _copies(x)
        with pytest.raises(ValueError, match=f"{argument}: expected {words}"):
            st.sgd_step_(*x, lr=0.1, momentum=0.9, **{argument: value})
        _assert_same_bits(x, before)

    @pytest.mark.parametrize("value", [True, torch.tensor(True)], ids=["bool", "tensor"])
    def test_a_bool_is_told_what_it_should_be(self, value: Any) -> None:
        said = r"found_inf: expected .*got bool; .* one element of float32 on cpu: torch\.tensor\(1"
        with pytest.raises(TypeError, match=said):
            st.sgd_step_(*_lists(3), lr=0.1, momentum=0.9, found_inf=value)

    @pytest.mark.parametrize("value", [2.0, "2", object(), torch.ones(1, dtype=torch.int32)],
                             ids=["float", "str", "object", "int32"])  # fmt: skip
    @pytest.mark.parametrize("name", ["sgd", "adam"])
    def test_not_a_floating_array(self, value: Any, name: str) -> None:
        x = _lists(5)
        before = _copies(x)
        with pytest.raises(TypeError, match="clip_factor: expected"):
            _STEPS[name](x, clip_factor=value)
        _assert_same_bits(x, before)

    @every_step
    def test_memory_that_the_step_writes(self, name: str) -> None:
        x = _lists(5)
        before = _copies(x)
        with pytest.raises(ValueError, match=r"grad_scale: expected memory .* overlap with params"):
            _STEPS[name](x, grad_scale=x[0][0])
        _assert_same_bits(x, before)

    def test_a_tensor_without_memory(self) -> None:
        with pytest.raises((TypeError, ValueError), match="found_inf"):
            _sgd(_lists(5), found_inf=torch.ones((), device="meta"))


@pytest.mark.cuda
class TestOnAGpu:
    """The CPU never waits: torch's synchronizations are errors in these tests."""

    @pytest.mark.parametrize("found", [0.0, 1.0])
    @every_step
    def test_the_bits_of_the_cpu_without_a_synchronization(self, name: str, found: float) -> None:
        x, expected = _lists(5, device="cuda"), _lists(5)
        gate = {"grad_scale": 3.7, "clip_factor": 0.3, "found_inf": found}
        on_gpu = {key: _one(value, "cuda") for key, value in gate.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            _STEPS[name](x, **on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _STEPS[name](expected, **{key: _one(value) for key, value in gate.items()})
        _assert_same_bits(x, expected)

    def test_a_graph_decides_at_every_replay(self) -> None:
        x = _lists(3, device="cuda")
        found = _one(0.0, "cuda")
        plan = st.Plan(x[0], momentum_buffers=x[2], grads=x[1])
        plan.sgd_step_(lr=0.1, momentum=0.9, found_inf=found)  # queries the device's constants once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.sgd_step_(lr=0.1, momentum=0.9, found_inf=found)
        before = _copies(x)
        found.fill_(1.0)
        graph.replay()
        _assert_same_bits(x, before)
        found.fill_(0.0)
        graph.replay()
        st.sgd_step_(*before, lr=0.1, momentum=0.9)
        _assert_same_bits(x, before)

    def test_a_scalar_on_the_host_is_refused(self) -> None:
        x = _lists(5, device="cuda")
        with pytest.raises(ValueError, match=r"found_inf: expected an array on cuda:\d+.*got cpu"):
            _sgd(x, found_inf=_one(0.0))
