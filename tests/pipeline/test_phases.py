"""Tests methods with phases: when one ends, and what goes on.

``oracle.cases`` has their results.
"""

from __future__ import annotations

import copy
import json

import pytest
from helpers.pipeline_cases import Compared, batches, close, mse, sgd, tanh_stages, torch_sgd
from oracle.definition import Oracle
from oracle.methods import hybrid as defined
from torch import nn

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


# A measured gap


def gaps(stages, data):
    """Return for every minibatch how far stage 0 moves from forward to update under pipedream."""
    oracle = Oracle(stages, torch_sgd(), mse, "pipedream")
    oracle.run(data)
    found = []
    for i in range(len(data)):
        now, then = ([row.weight for row in oracle.versions[0][v]] for v in (i, max(0, i - 3)))
        norm = sum(float((a - b).square().sum()) for a, b in zip(now, then, strict=True))
        found.append((norm / sum(float(a.square().sum()) for a in now)) ** 0.5)
    return found


def test_a_gap():
    """One minibatch at a time is measured: 1, 5, 9, and so on, because 3 more are in flight."""
    stages, data = tanh_stages(4), batches(18)
    found = gaps(stages, data)
    looked = range(1, 12, 4)
    switched = set()
    for gap in (share * found[i] for i in looked for share in (0.999, 1.001)):
        pipe = make(stages, st.hybrid("pipedream", after=None, gap=gap))
        results = list(pipe.run(data))
        assert [result.index for result in results] == list(range(18))
        first = next((i for i in looked if found[i] > gap), None)
        if first is None:
            continue
        # before the request for the fourth after it
        oracle = Oracle(stages, torch_sgd(), mse, defined("pipedream", "sync", first + 4))
        assert pipe.phase == 1
        switched.add(first)
        for result, loss in zip(results, oracle.run(data), strict=True):
            close(result.loss, loss)
    assert len(switched) > 1


def test_a_gap_that_shows_in_the_drain_ends_the_phase():
    stages, data = tanh_stages(4), batches(12)
    found = gaps(stages, data)
    assert found[5] > found[1]
    pipe = make(stages, st.hybrid("pipedream", after=None, gap=0.99 * found[5]))
    list(pipe.run(data[:6]))
    assert (pipe.minibatches, pipe.phase) == (6, 1)


def test_what_is_never_late_has_no_gap():
    pipe = make(tanh_stages(3), st.hybrid("sync", "vanilla", after=None, gap=1e-300))
    list(pipe.run(batches(6)))
    assert pipe.phase == 0


# The pipeline's reports


def test_memory_is_that_of_the_larger_phase():
    stages = tanh_stages(4)
    pipe = make(stages, "pipedream+sync@8")
    predicted = pipe.predicted_memory()
    assert predicted == make(stages, "pipedream").predicted_memory()
    assert make(stages, "sync+pipedream@8").predicted_memory() == predicted
    list(pipe.run(batches(7)))
    assert pipe.measured_memory() == predicted
    assert [place.window for place in pipe.places] == [4, 3, 2, 1]
    list(pipe.run(batches(7)))
    assert [place.window for place in pipe.places] == [1] * 4
    assert [found.versions for found in pipe.measured_memory()] == [1] * 4


def test_windows_are_those_of_the_phases_that_have_some():
    pipe = make(tanh_stages(3), "vanilla+sync@4", window="wide")
    assert [place.window for place in pipe.places] == [5, 3, 1]
    with pytest.raises(ValueError, match="there is no window to choose"):
        make(tanh_stages(3), "gpipe+sync@4", window="wide")


def test_microbatches_are_as_many_as_the_one_that_wants_more_usually_has():
    pipe = make(tanh_stages(4), "pipedream+1f1b@3", microbatches="auto")
    assert {place.microbatches for place in pipe.places} == {4}


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
    for loss, result in zip(oracle.run(data[4:]), pipe.run(data[4:]), strict=True):
        close(result.loss, loss)
    assert pipe.weight_version_bytes == make(stages, "sync").weight_version_bytes
    pipe.release()
    assert pipe.weight_version_bytes == 0


def test_what_looks_on_sees_both(tmp_path):
    data, trace = batches(12), st.Trace()
    pipe = make(tanh_stages(3), "pipedream+sync@7")
    with st.Metrics(pipe, tmp_path / "m.jsonl", every=4, errors_every=2) as metrics:
        list(pipe.run(data, trace=[trace, metrics]))
    forwards = [s for s in trace.spans() if s.stage == 0 and s.kind.value == "forward"]
    assert [span.minibatch for span in forwards] == list(range(12))
    # the window is 3 within the phase; synchronous minibatches follow all earlier updates
    assert [span.version for span in forwards] == [0, 0, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    updates = [s for s in trace.spans() if s.stage == 2 and s.kind.value == "update"]
    assert [span.version for span in updates] == list(range(1, 13))
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    first = [record for record in records if record["stage"] == 0]
    assert [record["minibatch"] for record in first] == [4, 8, 12]
    assert [record["staleness"]["scheduled"] for record in first] == [2, 0, 0]
    assert [record["staleness"]["max"] for record in first] == [2, 2, 0]
    assert first[0]["staleness_error"] > 0


def test_rates_need_changes_that_are_known_before():
    inner = st.hybrid("1f1b", "pipemare", after=4)
    with pytest.raises(ValueError, match="rates are counted from changes that are known before"):
        make(tanh_stages(4), st.hybrid("pipedream", inner, after=None, gap=0.1))
    # With as many microbatches as stages the rates of auto are the optimizer's own.
    make(tanh_stages(4), st.hybrid("auto", after=None, gap=0.1), microbatches=4)


def test_a_gap_of_a_stage_without_parameters_is_refused():
    stages = [nn.Tanh(), nn.Linear(5, 5)]
    with pytest.raises(ValueError, match=r"a gap of stages\[0\], which has no trainable"):
        make(stages, st.hybrid("vanilla", "sync", after=None, gap=0.1))
