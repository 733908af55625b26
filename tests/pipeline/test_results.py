"""Tests what a run hands out: its results, what they keep of outputs, and several observers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.pipeline_cases import (  # noqa: F401
    batches,
    close,
    every_method,
    float64,
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn

import spectrain_ext as st


class Seen(st.Observer):
    def __init__(self, log, name, fails=None):
        self.log, self.name, self.fails = log, name, fails

    def note(self, what):
        self.log.append((self.name, what))
        if self.fails == what:
            raise ValueError(f"{self.name} fails in {what}")

    def begin(self, rules, devices):
        self.note("begin")

    def watch(self, stage, handlers):
        def wrapped(kind, handler):
            def run(i, j):
                self.note(kind)
                handler(i, j)

            return run

        self.note(stage.index)
        return {kind: wrapped(kind, handler) for kind, handler in handlers.items()}

    def result(self, result):
        self.note("result")

    def end(self):
        self.note("end")


def test_several_observers_look_on(tmp_path):
    pipe, data, log = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3), []
    trace = st.Trace()
    list(pipe.run(data, trace=(Seen(log, "a"), trace, Seen(log, "b"))))
    of = {name: [what for who, what in log if who == name] for name in "ab"}
    assert of["a"] == of["b"]
    assert of["a"].count("result") == 3
    assert (log[0], log[-1]) == (("a", "begin"), ("b", "end"))
    assert len(trace.spans()) > 3
    plain = []
    list(pipe.run(data, trace=[Seen(plain, "a")]))
    assert [what for _, what in plain] == of["a"]
    assert len(list(pipe.run(data, trace=[]))) == 3
    for wrong, where in (([trace, 3], r"trace\[1\]: .*int"), (True, "trace: .*bool")):
        with pytest.raises(TypeError, match=where):
            pipe.run(data, trace=wrong)
    manager = st.checkpoint.CheckpointManager(tmp_path, pipe)
    kept = [r.kept for r in manager.run(data, trace=[trace, st.Trace()], keep=right)]
    assert len(kept) == 3 and kept[0].dim() == 0


@pytest.mark.parametrize("what", ["begin", "result", "end"])
def test_one_observer_fails_and_all_end(what):
    pipe, data, log = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3), []
    observers = [Seen(log, "a"), Seen(log, "b", fails=what), Seen(log, "c")]
    with pytest.raises(ValueError, match=f"b fails in {what}"):
        list(pipe.run(data, trace=observers))
    ended = {name for name, noted in log if noted == "end"}
    assert ended == ({"a"} if what == "begin" else {"a", "b", "c"})
    assert len(losses(pipe, data)) == 3


def right(output, target):
    return (output > target).double().mean()


def both(output, target):
    assert not torch.is_grad_enabled()
    return {"right": right(output, target), "sides": (output, target)}


@every_method
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_results_carry_what_was_asked_for(method, recompute, device):
    data = [(x.to(device), y.to(device)) for x, y in batches(5, size=6, last=7)]
    more = {"devices": None if device == "cpu" else ["cuda:0"] * 3, "recompute": recompute}
    parts, runs = 1 if recompute else 3, []
    for keep in (None, both):
        torch.manual_seed(4)
        stages = [
            nn.Sequential(nn.ReLU(True), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4))
            for _ in range(3)
        ]
        pipe = st.Pipeline(stages, sgd(), mse, method, microbatches=parts, **more)
        found = list(pipe.run(data, keep=keep))
        runs.append((found, [*(r.loss for r in found), *pipe.state_dict().values()]))
    (plain, state), (results, same) = runs
    assert all(map(torch.equal, state, same))
    assert {result.kept for result in plain} == {None}
    for result, (_, y) in zip(results, data, strict=True):
        output, target = result.kept["sides"]
        assert torch.equal(target, y) and not output.requires_grad
        close(result.kept["right"], right(output, target))
        each = zip(output.tensor_split(parts), target.tensor_split(parts), strict=True)
        close(sum(mse(*part) * len(part[0]) for part in each) / len(target), result.loss)


class Counting(nn.Module):
    """A loss with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return mse(output, target)


@pytest.mark.parametrize("keep", [None, right])
def test_a_recomputation_leaves_the_buffers_of_a_loss_whose_outputs_are_kept(keep):
    loss = Counting()
    pipe = st.Pipeline(tanh_stages(2), sgd(), loss, "spectrain", recompute=True)
    list(pipe.run(batches(4), keep=keep))
    assert loss.calls == 4


def test_what_cannot_be_kept():
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    with pytest.raises(TypeError, match="keep: expected a callable, got str"):
        pipe.run(data, keep="outputs")
    with pytest.raises(st.StageError, match="a dict or tuple of tensors, got a float; in keep"):
        list(pipe.run(data, keep=lambda output, target: 0.5))
    assert len(losses(pipe, data)) == 3
    for result in pipe.run(data, keep=right):
        assert replace(result, index=8).kept is result.kept
        assert "kept" not in repr(result)
