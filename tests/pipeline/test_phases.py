"""Tests changes of the method: when, and what goes on; ``oracle.cases`` has hybrids' results."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from helpers.pipeline_cases import batches, losses, mse, sgd, tanh_stages, torch_sgd
from torch.optim.lr_scheduler import StepLR

import spectrain_ext as st

pytestmark = pytest.mark.usefixtures("float64")


def make(stages, method, optimizer=sgd(), microbatches=1, **more):  # noqa: B008
    more["microbatches"] = microbatches
    return st.Pipeline(copy.deepcopy(stages), optimizer, mse, method, **more)


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
    assert (mine.method, mine.places, whole.phase) == (whole.method, whole.places, mine.phase + 1)
    st.checkpoint.save(tmp_path / "saved", mine)
    again.change(then, window=window)
    st.checkpoint.load(tmp_path / "saved", again)
    assert losses(mine, data[9:]) == losses(again, data[9:]) == losses(whole, data[9:])
    with pytest.warns(UserWarning, match=f"since minibatch [57], and goes on under .*'{first}'"):
        st.checkpoint.load(tmp_path / "saved", other)


def test_a_change_that_is_refused_changes_nothing():
    stages, data = tanh_stages(3), batches(4)
    more = {"clip_norm": 0.05, "clip_scope": "global", "optimizer": torch_sgd()}
    pipe, same = (make(stages, "1f1b", **more) for _ in range(2))
    flushing = replace(st.spectrain(), schedule="gpipe")  # nothing else is wrong with it
    for method, window, match in (
        ("nope", None, "there is no 'nope'"),
        ("vanilla", [1, 2, 2], "a deadlock"),
        ("pipedream-2bw", None, "at least 3 microbatches"),
        (st.hybrid("sync", flushing, after=9), None, "torch.optim.sgd.SGD, and method 'spectrain'"),
        ("vanilla", None, "clip_scope: under method 'vanilla'"),
    ):
        with pytest.raises(ValueError, match=match):
            pipe.change(method, window=window)
    steady = st.passes.Pass()
    steady.check = lambda method: 1 // (method.then is None)
    with pytest.raises(ZeroDivisionError):
        make(stages, "1f1b", passes=[steady]).change("sync")
    assert repr(pipe) == repr(same)
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
    list(pipe.run(batches(7)))
    assert [found.versions for found in pipe.measured_memory()] == [1] * 4


def test_arguments_of_both_phases(caplog):
    """Windows are those of the phases that have some; the one with more microbatches decides."""
    stages = tanh_stages(3)
    pipe = make(stages, "vanilla+sync@4", window="wide")
    assert [place.window for place in pipe.places] == [5, 3, 1]
    caplog.set_level("INFO")
    pipe = make(stages, "pipedream+1f1b@3", microbatches="auto", clip_norm=0.03)
    assert "gradients are clipped by the norm of each stage, then all stages" in caplog.text
    assert {place.microbatches for place in pipe.places} == {3}
    with pytest.raises(ValueError, match="there is no window to choose"):
        make(stages, "gpipe+sync@4", window="wide")


def test_failures_count_what_was_begun_and_evaluations_nothing():
    pipe, data = make(tanh_stages(3), "pipedream+sync@6"), batches(5)
    list(pipe.run(data[:2]))
    with pytest.raises(TypeError):
        list(pipe.run([*data[:3], None]))
    pipe.evaluate(data)
    assert pipe.minibatches == 5
    pipe.release()
    assert len(list(pipe.run(batches(6)))) == 6
    assert pipe.phase == 1


def test_what_looks_on_sees_both():
    """With a window of 3; synchronous minibatches follow all earlier updates."""
    for method, versions, late in (
        ("pipedream+sync@7", [0, 0, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11], [(2, 2), (0, 2), (0, 0)]),
        ("sync+pipedream@4", [0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9], [(0, 0), (2, 2), (2, 2)]),
    ):
        pipe, trace, records = make(tanh_stages(3), method), st.Trace(), []
        metrics = st.Metrics(pipe, write=records.append, every=4, errors_every=2)
        list(pipe.run(batches(12), trace=[trace, metrics]))
        forwards = [s for s in trace.spans() if s.stage == 0 and s.kind.value == "forward"]
        assert [(span.minibatch, span.version) for span in forwards] == list(enumerate(versions))
        first = [record for record in records if record["stage"] == 0]
        assert [record["minibatch"] for record in first] == [4, 8, 12]
        found = [record["staleness"] for record in first]
        assert [(staleness["scheduled"], staleness["max"]) for staleness in found] == late
        assert any(record["staleness_error"] for record in first)
