"""Tests changes of the method, by hand and of hybrids: when, and what goes on.

``oracle.cases`` has their results.
"""

from __future__ import annotations

import copy
import json

import pytest
from helpers.pipeline_cases import (
    Compared,
    batches,
    close,
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from oracle.definition import Oracle
from oracle.methods import hybrid as defined
from torch.optim.lr_scheduler import StepLR

import spectrain_ext as st
from spectrain_ext.weights import StageWeights

pytestmark = pytest.mark.usefixtures("float64")


def make(stages, method, **more):
    more.setdefault("optimizer", sgd())
    more.setdefault("microbatches", 1)
    return st.Pipeline(copy.deepcopy(stages), loss_fn=mse, method=method, **more)


def test_three_phases():
    end = st.hybrid("vanilla", "spectrain", after=8)
    definition = defined("sync", "vanilla", 3)
    inner = defined("vanilla", "spectrain", 8)
    object.__setattr__(definition, "then", (inner, 3))
    compared = Compared(tanh_stages(4), st.hybrid("sync", end, after=3), definition=definition)
    compared.run(batches(14))
    assert compared.pipe.phase == 2


@pytest.mark.parametrize(
    ("first", "then", "more"),
    [
        ("sync", "spectrain-local", {"window": "wide"}),  # more messages than before
        ("1f1b", "zb-h1-async", {"microbatches": 4}),
        ("1f1b", st.pipemare(updates=6), {"scheduler": lambda opt: StepLR(opt, 3)}),
        ("pipedream", "1f1b+vanilla@7", {"clip_norm": 0.05}),
    ],
)
def test_a_change_by_hand_gives_a_hybrids_bits(first, then, more, tmp_path):
    """Also after a checkpoint, in a pipeline that has the method before it loads."""
    stages, data, window = tanh_stages(4), batches(12, size=4), more.get("window")
    whole = make(stages, st.hybrid(first, then, after=5), **more)
    mine, again, other = (make(stages, first, **{**more, "window": None}) for _ in range(3))
    found = losses(mine, data[:5])
    mine.change(then, window=window)
    assert found + losses(mine, data[5:9]) == losses(whole, data[:9])
    assert (mine.method, mine.places) == (whole.method, whole.places)
    st.checkpoint.save(tmp_path / "saved", mine)
    again.change(then, window=window)
    st.checkpoint.load(tmp_path / "saved", again)
    expected = losses(whole, data[9:])
    assert losses(mine, data[9:]) == losses(again, data[9:]) == expected
    with pytest.warns(UserWarning, match=f"since minibatch [57], and goes on under .*'{first}'"):
        st.checkpoint.load(tmp_path / "saved", other)


class Steady(st.passes.Pass):
    def check(self, method):
        if method.then is not None:
            raise ValueError("Steady: there must be no change")


def test_a_change_that_is_refused_changes_nothing():
    stages, data = tanh_stages(3), batches(4)
    more = {"clip_norm": 0.05, "clip_scope": "global", "optimizer": torch_sgd()}
    pipe, same = (make(stages, "1f1b", **more) for _ in range(2))
    shown = repr(pipe)
    for method, window, match in (
        ("nope", None, "there is no 'nope'"),
        ("gpipe", "wide", "there is no window to choose"),
        ("vanilla", [1, 2, 2], "a deadlock"),
        ("pipedream-2bw", None, "at least 3 microbatches"),
        ("sync+spectrain@9", None, "torch.optim.sgd.SGD, and method 'spectrain'"),
        ("vanilla", None, "clip_scope: under method 'vanilla'"),
    ):
        with pytest.raises(ValueError, match=match):
            pipe.change(method, window=window)
    with pytest.raises(ValueError, match="Steady: there must be no change"):
        make(stages, "1f1b", passes=[Steady()]).change("sync")
    assert repr(pipe) == shown
    run = pipe.run(data)
    first = next(run).loss
    with pytest.raises(RuntimeError, match="change: a run of this pipeline has not ended"):
        pipe.change("sync")
    assert [first, *(result.loss for result in run)] == losses(same, data)


def test_memory_is_that_of_the_larger_phase():
    stages = tanh_stages(4)
    pipe = make(stages, "pipedream+sync@8")
    predicted = make(stages, "pipedream").predicted_memory()
    for name in ("pipedream+sync@8", "sync+pipedream@8"):
        assert make(stages, name).predicted_memory() == predicted
    list(pipe.run(batches(7)))
    assert pipe.measured_memory() == predicted
    assert [place.window for place in pipe.places] == [4, 3, 2, 1]
    list(pipe.run(batches(7)))
    assert [place.window for place in pipe.places] == [1] * 4
    assert [found.versions for found in pipe.measured_memory()] == [1] * 4


def test_arguments_of_both_phases():
    """Windows are those of the phases that have some; the one with more microbatches decides."""
    stages = tanh_stages(3)
    pipe = make(stages, "vanilla+sync@4", window="wide")
    assert [place.window for place in pipe.places] == [5, 3, 1]
    pipe = make(stages, "pipedream+1f1b@3", microbatches="auto")
    assert {place.microbatches for place in pipe.places} == {3}
    with pytest.raises(ValueError, match="there is no window to choose"):
        make(stages, "gpipe+sync@4", window="wide")


def test_failures_count_what_was_begun_and_evaluations_nothing():
    pipe, data = make(tanh_stages(3), "pipedream+sync@6"), batches(5)
    list(pipe.run(data[:2]))

    def broken():
        yield from data[:3]
        raise KeyError

    with pytest.raises(KeyError):
        list(pipe.run(broken()))
    pipe.evaluate(data)
    assert pipe.minibatches == 5
    pipe.release()
    assert len(list(pipe.run(batches(6)))) == 6
    assert pipe.phase == 1


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_an_interrupt_in_the_change(stage, where, monkeypatch):
    """The true weights survive, and the next run completes the change."""
    stages, data = tanh_stages(3), batches(9)
    pipe = make(stages, "spectrain+sync@4")
    whole, calls = StageWeights.follow, []

    def interrupted(self, *given):
        calls.append(self)
        if len(calls) <= stage:
            return whole(self, *given)
        if where == "between":
            monkeypatch.setattr(self, "bind", stop)
        if where != "before":
            whole(self, *given)
        stop()

    def stop():
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(StageWeights, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(pipe.run(data))
    oracle = Oracle(stages, torch_sgd(), mse, defined("spectrain", "sync", 4))
    oracle.run(data[:4])
    for module, expected in zip(pipe.children(), oracle.stages, strict=True):
        close(module.state_dict(), expected.state_dict())
    assert (pipe.minibatches, pipe.phase) == (4, 1)
    close([result.loss for result in pipe.run(data[4:])], oracle.run(data[4:]))
    assert pipe.weight_version_bytes == make(stages, "sync").weight_version_bytes


def test_what_looks_on_sees_both(tmp_path):
    data, trace = batches(12), st.Trace()
    pipe = make(tanh_stages(3), "pipedream+sync@7")
    with st.Metrics(pipe, tmp_path / "m.jsonl", every=4, errors_every=2) as metrics:
        list(pipe.run(data, trace=[trace, metrics]))
    forwards = [s for s in trace.spans() if s.stage == 0 and s.kind.value == "forward"]
    # the window is 3 within the phase; synchronous minibatches follow all earlier updates
    versions = [0, 0, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert [(span.minibatch, span.version) for span in forwards] == list(enumerate(versions))
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    first = [record for record in records if record["stage"] == 0]
    assert [record["minibatch"] for record in first] == [4, 8, 12]
    late = [(record["staleness"]["scheduled"], record["staleness"]["max"]) for record in first]
    assert late == [(2, 2), (0, 2), (0, 0)]
    assert first[0]["staleness_error"] > 0
