"""Tests evaluations: true weights, an undisturbed training, and whatever metrics ask for."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from helpers.pipeline_cases import batches, every_method, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from helpers.random_modules import Function
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


class Noted(nn.Module):
    """Changes its input in place, and records whether there was a graph."""

    def __init__(self):
        super().__init__()
        self.graphs = []

    def forward(self, x):
        self.graphs.append(torch.is_grad_enabled())
        return x.mul_(2)


def living(n=3):
    """Return stages that draw random numbers and keep statistics in training."""
    return [
        nn.Sequential(Noted(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Tanh())
        for _ in range(n)
    ]


def drawing():
    """Return such stages that draw random numbers in evaluation mode too."""
    return [nn.Sequential(stage, Function(nn.functional.dropout)) for stage in living()]


def expected(pipe, data, *functions):
    """Return the means over all samples, in one process without a pipeline."""
    model = nn.Sequential(*copy.deepcopy(list(pipe.children()))).cpu().eval()
    with torch.no_grad():
        pairs = [(model(x.clone()), y) for x, y in data]
        total = sum(len(y) for _, y in pairs)
        return [sum(f(*pair).item() * len(pair[1]) for pair in pairs) / total for f in functions]


def modes(pipe):
    return {name: module.training for name, module in pipe.named_modules()}


class Together:
    """A metric with a state: keeps its arguments."""

    def __init__(self):
        self.resets, self.given = 0, []

    def reset(self):
        self.resets += 1
        self.given.clear()

    def update(self, output, target):
        assert not output.requires_grad
        self.given.append((output, target))

    def compute(self):
        outputs, targets = map(torch.cat, zip(*self.given, strict=True))
        return (outputs - targets).abs().amax()


@every_method
@pytest.mark.parametrize("device", DEVICES)
def test_an_evaluation_measures_the_true_weights(method, device):
    devices = None if device == "cpu" else ["cuda:0"] * 3
    pipe = st.Pipeline(living(), sgd(), mse, method, devices, microbatches=2)
    test = batches(7, size=4, last=1)
    for _ in range(2):
        list(pipe.run([(x.to(device), y.to(device)) for x, y in batches(6, size=4)]))
        biggest = Together()
        found = pipe.evaluate(test, {"mse": mse, "biggest": biggest, "mean": nn.L1Loss()})
        assert list(found) == ["mse", "biggest", "mean"]
        wanted = pytest.approx(expected(pipe, test, mse, nn.L1Loss()), rel=1e-12)
        assert [found["mse"], found["mean"]] == wanted
        assert biggest.resets == 1
        assert found["biggest"] == max((a - b).abs().max().item() for a, b in biggest.given)
        for (_, kept), (_, target) in zip(biggest.given, test, strict=True):
            assert torch.equal(kept.cpu(), target)
        assert pipe.evaluate(test) == {"loss": found["mse"]}
    pipe.release()
    assert pipe.evaluate(test) == {"loss": pytest.approx(found["mse"], rel=1e-12)}
    assert pipe.weight_version_bytes == 0  # it needs no buffers of weights
    assert [stage[0].graphs[-7:] for stage in pipe.children()] == [[False] * 7] * 3


@every_method
def test_training_goes_on_as_if_nobody_had_evaluated(method):
    data, test, runs = batches(6, size=4), batches(3, size=11), []
    for evaluates in (False, True):
        torch.manual_seed(1)
        pipe = st.Pipeline(drawing(), sgd(), mse, method)
        loader = DataLoader(TensorDataset(*map(torch.cat, zip(*data, strict=True))), 4, True)
        for _ in range(2):
            if evaluates:
                pipe.evaluate(DataLoader(TensorDataset(*test[0]), 2, shuffle=True))
                before = pipe.weight_version_bytes, pipe.measured_memory()
                pipe.evaluate(test)
                assert (pipe.weight_version_bytes, pipe.measured_memory()) == before
            found = losses(pipe, loader)
        runs.append([*found, torch.rand(3), *pipe.state_dict().values()])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("what", ["metric", "stage", "batch", "interrupt"])
def test_all_modes_are_restored_whatever_happens(what):
    stages, inside = living(), []
    for module in (stages[0], stages[1][2], stages[2][2]):
        module.eval()
    pipe = st.Pipeline(stages, sgd(), mse)
    before = modes(pipe)

    def broken(*_):
        inside.append({module.training for module in pipe.children()})
        raise KeyboardInterrupt("broken") if what == "interrupt" else ValueError("broken")

    def given():
        yield from batches(3, size=4)
        if what == "batch":
            broken()

    hook = broken if what in ("stage", "interrupt") else lambda *_: None
    handle = stages[1].register_forward_hook(hook)
    with pytest.raises((ValueError, KeyboardInterrupt, st.StageError), match="broken"):
        pipe.evaluate(given(), {"mine": broken} if what == "metric" else None)
    assert modes(pipe) == before
    assert inside[0] == {False}
    handle.remove()
    stages[1][2].train()
    before = modes(pipe)
    assert pipe.evaluate(batches(2))["loss"] > 0
    assert modes(pipe) == before


def test_whatever_train_does_beside_flags_is_done():
    class Switching(nn.Linear):
        calls = 0

        def train(self, mode=True):
            self.calls += 1
            return super().train(mode)

    pipe = st.Pipeline([stage := Switching(5, 5)], sgd(), mse)
    for training, calls in ((True, 2), (False, 0)):
        stage.train(training)
        stage.calls = 0
        pipe.evaluate(batches(2))
        assert (stage.calls, stage.training) == (calls, training)


def test_a_batch_without_samples_is_not_measured():
    pipe, data = st.Pipeline(living(), sgd(), mse), batches(4, size=4)
    none = (torch.empty(0, 5), torch.empty(0, 5))
    metrics = {"mse": mse, "biggest": (biggest := Together())}
    assert pipe.evaluate(data, metrics) == pipe.evaluate([none, *data, none], metrics)
    assert len(biggest.given) == 4
    for nothing in ([none], []):
        with pytest.raises(ValueError, match="expected at least one to evaluate, got none"):
            pipe.evaluate(nothing)


@dataclass
class Passed:
    """A class that torch's trees treat as a leaf."""

    output: torch.Tensor
    inside: list[torch.Tensor]


def test_metrics_may_keep_what_they_are_given():
    """Including the last stage's input, which is in a receive buffer."""
    kept = []
    stages = [nn.Linear(5, 5), Function(lambda x: Passed(2 * x, [x]))]
    pipe = st.Pipeline(stages, sgd(), lambda out, y: mse(out.output, y))
    metrics = {"mine": lambda out, _: kept.append(out) or 1.0}
    assert pipe.evaluate(batches(5), metrics) == {"mine": 1}
    assert len(kept) == 5
    for found in kept:
        assert torch.equal(found.output, 2 * found.inside[0])


def test_runs_and_evaluations_do_not_meet():
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(4)
    run = pipe.run(data)
    next(run)
    with pytest.raises(RuntimeError, match="evaluate: a run of this pipeline has not ended"):
        pipe.evaluate(data)
    run.close()
    with pytest.raises(st.StageError, match="run: an evaluation of this pipeline has not ended"):
        pipe.evaluate(data, {"mine": lambda *_: next(pipe.run(data))})
    assert len(losses(pipe, data)) == 4


@pytest.mark.parametrize(
    ("metrics", "error", "text"),
    [
        ([mse], TypeError, r"metrics: expected a mapping of names to metrics, got list"),
        ({1: mse}, TypeError, r"metrics: expected str as names, got 1"),
        ({"a": 3}, TypeError, r"metrics\['a'\]: expected a function \(output, target\), or"),
        ({"a": Together}, TypeError, r"metrics\['a'\]: expected .*, got the class Together"),
        ({"a": lambda o, t: o}, st.StageError, r"number, got torch.float64 of shape \(3, 5\)"),
        ({"a": lambda o, t: None}, st.StageError, r"a number, got NoneType; in metrics\['a'\]"),
        ({"a": lambda o, t: o.no}, st.StageError, r"metrics: .*'no'; .*called with .*target torch"),
    ],
)
def test_metrics_that_are_none(metrics, error, text):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    with pytest.raises(error, match=text):
        pipe.evaluate(batches(2), metrics)


def test_an_evaluation_may_take_place_inside():
    pipe, data = st.Pipeline(living(), sgd(), mse, microbatches=2), batches(4, size=4)
    expected = pytest.approx(pipe.evaluate(data)["loss"], rel=0.1)
    for inside in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with inside:
            assert pipe.evaluate(data)["loss"] == expected
        assert len(losses(pipe, data[:1])) == 1
        expected = pytest.approx(pipe.evaluate(data)["loss"], rel=0.1)
