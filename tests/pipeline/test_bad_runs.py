"""Tests the errors of a run: each names the problem, its place and what was expected."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages, torch_sgd  # noqa: F401
from helpers.random_modules import Function
from torch import nn

import spectrain_ext as st

X, THREE = torch.zeros(2, 5), torch.zeros(3, 5)
LEAF = torch.zeros(2, 5, requires_grad=True)
ENCODED = LEAF * 2  # as by a module in front of the pipeline
with warnings.catch_warnings(action="ignore"):  # all are in prototype stage
    CSR = X.to_sparse_csr()
    NESTED = torch.nested.nested_tensor([X, THREE])
    JAGGED = torch.nested.nested_tensor([X, THREE], layout=torch.jagged)
PACKED = nn.utils.rnn.pack_sequence([THREE, X])


def scaled(output, target):
    return (output - target) ** 2


@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (scaled, ValueError, r"must return a scalar \(a 0-d tensor\), got shape \(3, 5\)"),
        (lambda out, y: mse(out, y).reshape(1), ValueError, r"got shape \(1,\)"),
        (lambda out, y: 0.5, TypeError, r"a 0-d tensor, or a pair \(sum, count\), got a float"),
        (lambda out, y: mse(out, y) * 1j, TypeError, "must return a real number, got torch.c"),
        (lambda out, y: mse(out, y).detach(), ValueError, "does not depend on the output"),
        (lambda out, y: (out > y).sum(), ValueError, "does not depend on the output"),
        (lambda out, y: mse(out.detach(), y), ValueError, "does not depend on the output"),
        (lambda out, y: (out.sum(), "3"), TypeError, "must be a number or a 0-d tensor, got str"),
        (lambda out, y: (out.sum(), y[:2, 0]), TypeError, r"or a 0-d tensor, got shape \(2,\)"),
        (lambda out, y: (out.sum(), 1, 2), TypeError, r"a pair \(sum, count\), got a tuple"),
        (lambda out, y: (out.sum(), out), TypeError, r"got shape \(3, 5\); keep= takes what"),
        (lambda out, y: (out.sum(), -2), ValueError, r"and the count is -2: .* a sum of weights$"),
        (lambda out, y: (out.sum(), y[0, 0] / 0), ValueError, "and the count is -?inf: expected"),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_losses(loss_fn, error, match, recompute):
    pipe = st.Pipeline(tanh_stages(3), sgd(), loss_fn, microbatches=1, recompute=recompute)
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, batches(4))
    assert isinstance(caught.value.__cause__, error)
    assert (caught.value.stage, caught.value.minibatch) == (2, 0)
    assert caught.value.action in (["loss", "recompute"] if recompute else ["loss"])
    assert all(map(torch.equal, pipe.state_dict().values(), before.values()))


@pytest.mark.parametrize("recompute", [False, True])
def test_two_losses_are_no_sum_and_count(recompute):
    """A positive loss may be a sum of weights, but no count requires a gradient."""

    def two(output, target):
        return mse(output, target), output.abs().mean()

    pipe = st.Pipeline(tanh_stages(2), sgd(), two, microbatches=1, recompute=recompute)
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(st.StageError, match="return two losses as one, their sum, and a sum of w"):
        losses(pipe, batches(4))
    assert all(map(torch.equal, pipe.state_dict().values(), before.values()))


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_counts_in_advance(count):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, count=lambda y: torch.tensor(count))
    with pytest.raises(ValueError, match=f"what it returned is {float(count)}: expected") as caught:
        losses(pipe, batches(2))
    assert caught.value.__notes__ == ["in count"]


@dataclass
class Hidden:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (lambda x: (x, {3}), r"a stage's output\[1\]: expected a tensor, or tuples, .* got a set"),
        (lambda x: None, "a stage's output: expected a tensor in it, got None"),
        (Hidden, r"a stage's output: expected a tensor, or .* got a Hidden\. What the last stage"),
        (lambda x: {"x": x, "n": [{3}]}, r"output\['n'\]\[0\]: expected a tensor, .* got a set"),
        (lambda x: x.to_sparse(), r"a stage's output: expected a .* not dense \(torch.sparse_coo"),
        (lambda x: (x, x.to_sparse_csr()), r"output\[1\]: .* \(torch.sparse_csr\); give its ind"),
        (lambda x: torch.nested.as_nested_tensor([x, x]), r"a stage's output: .* a nested tensor"),
        (lambda x: nn.utils.rnn.pack_sequence([x]), r"a stage's output: .* got a PackedSequence"),
        (lambda x: {0: x}, r"a stage's output: expected strings as keys, got 0"),
        (lambda x: ("x", [None]), r"a stage's output: expected a tensor in it, got \('x', \[None"),
    ],
)
def test_activations(output, match):
    pipe = st.Pipeline([*tanh_stages(1), Function(output), *tanh_stages(1)], sgd(), mse)
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, batches(4))
    assert isinstance(caught.value.__cause__, TypeError) and caught.value.stage == 1


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (X, TypeError, r"expected a pair \(input, target\), .* got a Tensor"),
        ((X,), TypeError, r"expected a pair .* got a tuple of length 1"),
        ([X] * 3, TypeError, r"expected a pair .* got a list of length 3"),
        ([], TypeError, r"expected a pair .* got a list of length 0"),
        (st.Microbatches(), TypeError, "expected a pair .* Microbatches of length 0"),
        ([(X, X), (X, X), X], TypeError, "expected a pair .* or a list of .* list of length 3"),
        ({"x": 1, "y": [2]}, TypeError, r"expected a tensor in it, got \{'x': 1, 'y': \[2\]\}"),
        (((), None), TypeError, r"expected a tensor in it, got \(\(\), None\)"),
        ([(X, X)] * 3, ValueError, "expected a list of at most 2 .* got 3"),
        ((torch.zeros(4, 5), torch.zeros(3, 5)), ValueError, r"has 4, the target has shape \(3, 5"),
        ((X, X.to("meta")), ValueError, r"the target: a tensor of shape \(2, 5\) is on the meta"),
        ({"x": np.ones(4)}, TypeError, r"\['x'\]: .* got a ndarray, whose arrays or tensors"),
        ({"x": X, "y": [Hidden(X)]}, TypeError, r"\['y'\]\[0\]: .* a Hidden, whose arrays or"),
        ({"x": X, 3: X}, TypeError, "expected strings as keys, got 3"),
        ({"x": X, "y": THREE}, ValueError, r"\['x'\] has 2, the batch\['y'\] has shape"),
        (({"x": np.ones(4)}, X), TypeError, r"the input\['x'\]: .* got a ndarray"),
        (({"x": X}, {"y": THREE}), ValueError, r"the input\['x'\] has 2, the target\['y'\] has"),
        (st.Microbatches([(X, X), (X, THREE)]), ValueError, r"\[1\]: .* the target has shape"),
        ((ENCODED, X), ValueError, "the input requires a gradient, .* first stage, .* detach"),
        (({"x": [X, LEAF]}, X), ValueError, r"the input\['x'\]\[1\] requires a gradient"),
        ((X, (X, ENCODED)), ValueError, r"the target\[1\] requires a gradient, .* the last one"),
        ({"x": X, "y": ENCODED}, ValueError, r"\['y'\] requires a gradient, and none"),
        (
            st.Microbatches([(X, X), (X, LEAF)]),
            ValueError,
            r"\[1\]: the target requires a gradient",
        ),
        ((X.to_sparse(), X), TypeError, r"not dense \(torch.sparse_coo\); give its indices and"),
        ((X, {"y": CSR}), TypeError, r"target\['y'\]: .* \(torch.sparse_csr\)"),
        ((NESTED, X), TypeError, r"input: .* a nested tensor; give torch.nested.to_padded_tensor"),
        ((JAGGED, X), TypeError, r"the input: expected .* got a nested tensor; give"),
        ((PACKED, X), TypeError, r"PackedSequence; give the padded tensor and the lengths, and pa"),
    ],
)
def test_batches(batch, error, match):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, microbatches=2)
    good = batches(2, size=4)
    with pytest.raises(error, match=r"batches\[2\].*" + match):
        losses(pipe, [*good, batch, *good])
    assert len(losses(pipe, good)) == 2


def test_an_evaluation_takes_batches_with_a_graph():
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    plain, graphs = ([(x.double(), x.double())] * 3 for x in (X, ENCODED))
    assert pipe.evaluate(graphs) == pipe.evaluate(plain)


T, Y = torch.zeros(7, 6, 5), torch.zeros(6, 5)  # by time, as nn.LSTM has it
OF_INPUT = "split_dim: of the input expected an int or None"
OF_TARGET = "split_dim: of the target expected an int or None"


@pytest.mark.parametrize(
    ("split_dim", "batch", "match"),
    [
        (0, (T, Y), r"in dimension 0, .*; the input has 7, the target has shape \(6, 5\); split_d"),
        ((3, 0), (T, Y), r"in dimension 3, .*; the input has shape \(7, 6, 5\)"),
        (((1, 2), 0), (T, Y), OF_INPUT + r", got \(1, 2\)"),
        ((1, {"y": 0}), (T, Y), OF_TARGET + ", got {'y': 0}"),
        ((1, True), (T, Y), OF_TARGET + ", got True"),
        (((1,), 0), ((T, T), Y), OF_INPUT + r", or 2 of them, got \(1,\)"),
        ({"z": 1}, {"x": T, "y": Y}, OF_INPUT + ", or a mapping of names among 'x', 'y', got"),
        ((1, 0), {"x": T, "y": Y}, r"batches\[0\] is a mapping, input and target in one; expected"),
    ],
)
def test_dimensions(split_dim, batch, match):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, "gpipe", microbatches=2, split_dim=split_dim)
    with pytest.raises(ValueError, match=match):
        losses(pipe, [batch])


def test_dimensions_that_are_none():
    for bad in ("1", (1, 0, 0), True, None):
        with pytest.raises(ValueError, match="split_dim: expected an int, a pair"):
            st.Pipeline(tanh_stages(2), sgd(), mse, split_dim=bad)
    pipe = st.Pipeline(tanh_stages(2), sgd(), lambda output, y: mse(output[-1], y), "sync")
    with pytest.warns(UserWarning, match=r"dimension 1 of the input; give split_dim=\(1, 0\)"):
        losses(pipe, [(T.double(), Y)])


@pytest.mark.parametrize("given", [3, None, lambda: batches(2)])
def test_batches_that_are_not_iterable(given):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    for call in (pipe.run, pipe.fit, pipe.evaluate):
        with pytest.raises(TypeError, match="batches: expected an iterable of batches, got "):
            call(given)


INPUT, TARGET = torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((TARGET, INPUT), r"stage 0.*forward: .*; called with input torch.int64 of shape \(2,\)$"),
        ({"x": INPUT}, r"; called with input {'x': 'torch.float64 of shape \(2, 5\)'}$"),
        ((INPUT, TARGET.double()), r"loss: .*with output torch.float64 of shape \(2, 3\), target "),
    ],
)
def test_what_a_module_or_a_loss_was_called_with(batch, match):
    stages = [nn.Linear(5, 5), nn.Linear(5, 3)]
    pipe = st.Pipeline(stages, sgd(), nn.CrossEntropyLoss(), microbatches=2)
    with pytest.raises(st.StageError, match=match):
        losses(pipe, [batch])
    with pytest.raises(st.StageError, match=r"forward: .*input torch.int64 of shape \(4,\)"):
        pipe.evaluate([(TARGET, INPUT)])


def test_modes_around_a_run():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    for inside in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with inside, pytest.raises(RuntimeError, match=r"(inference mode|autocast) is on"):
            losses(pipe, batches(3))
        assert len(losses(pipe, batches(3))) == 3


def test_an_exported_stage_has_one_mode():
    exported = torch.export.export(tanh_stages(1)[0], (torch.zeros(3, 5),)).module()
    pipe = st.Pipeline([*tanh_stages(1), nn.Sequential(exported)], sgd(), mse, microbatches=1)
    data = batches(2)
    losses(pipe, data)
    match = r"stages\[1\] cannot change between training and evaluation .*give the module that was"
    with pytest.raises(RuntimeError, match="evaluate: " + match):
        pipe.evaluate(data)
    with pytest.raises(RuntimeError, match=r"train: a stage cannot change"):
        pipe.eval()
    assert all(module.training for module in pipe.modules())
    losses(pipe, data)


# Parameters that left the pipeline


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("make", [sgd(), torch_sgd()])
def test_a_parameter_group_that_was_added(make, released):
    pipe = st.Pipeline(tanh_stages(2), make, mse, "1f1b")
    if released:
        pipe.release()
    with pytest.raises(RuntimeError, match=r"release\(\) th.* pipeline, and make .*new parameters"):
        pipe.optimizers[1].add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
        losses(pipe, batches(2))


def assigned(module):
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.load_state_dict(values, assign=True)


def given_other_data(module):
    p = next(module.parameters())
    p.data = p.data.clone()


def converted(module):
    module.float().double()


@pytest.mark.parametrize("leave", [assigned, given_other_data, converted])
@pytest.mark.parametrize("whole", [False, True])
def test_a_parameter_that_left_the_flat_buffer(leave, whole):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    losses(pipe, batches(3))
    leave(pipe if whole else next(pipe.children()))
    values = copy.deepcopy(pipe.state_dict())
    with pytest.raises(RuntimeError, match=r"stages\[0\]: parameter '0.weight' left .* flat buf"):
        losses(pipe, batches(3))
    assert all(map(torch.equal, pipe.state_dict().values(), values.values()))


@pytest.mark.parametrize("leave", [assigned, given_other_data, converted])
def test_a_parameter_that_leaves_while_the_run_is_suspended(leave):
    module = tanh_stages(1)[0]
    pipe, seen = st.Pipeline([*tanh_stages(1), module], sgd(), mse), []
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '0.weight' left"):
        for result in pipe.run(batches(8)):
            seen.append(result.index)
            leave(module)
    assert leave is assigned or seen == [0]  # a replaced one is found at the end


def test_two_pipelines_of_one_model():
    stages = tanh_stages(2)
    first = st.Pipeline(stages, sgd(), mse)
    losses(first, batches(2))
    second = st.Pipeline(stages, sgd(), mse)
    with pytest.raises(RuntimeError, match=r"stages\[0\]: another pipeline of this model .*rel"):
        losses(first, batches(1))
    for release, other in ((first, second), (second, first)):
        release.release()
        losses(other, batches(1))
