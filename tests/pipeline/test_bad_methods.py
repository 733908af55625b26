"""Tests contradictory methods and windows: errors name the field and the stage."""

from __future__ import annotations

import pytest
import torch
from helpers.pipeline_cases import (
    batches,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)

import spectrain_ext as st
from spectrain_ext.method import Method


def made(method, n=3, optimizer=None, **more):
    return st.Pipeline(tanh_stages(n), optimizer or sgd(), mse, method, **more)


def rule(*values):
    """One value per stage."""
    return lambda place: values[place.stage]


INCONSISTENT = {
    "a negative horizon": ({"forward_horizon": rule(0, 1, -1)}, 2, "forward_horizon"),
    "a horizon that is no number": ({"forward_horizon": rule(0, "1", 1)}, 1, "forward_horizon"),
    "half an update": ({"forward_horizon": rule(0.5, 0, 0)}, 0, "forward_horizon"),
    "a negative horizon of the backward": (
        {"backward": "predict", "backward_horizon": rule(0, -2, 0)},
        1,
        "backward_horizon",
    ),
    "a horizon of a backward that keeps": (
        {"backward": "stash", "backward_horizon": rule(0, 0, 1)},
        2,
        "backward_horizon",
    ),
    "a horizon of a backward at the newest": (
        {"backward_horizon": rule(0, 1, 0)},
        1,
        "backward_horizon",
    ),
    "a lead without the law that has one": ({"lead": rule(0, 0, 1)}, 2, "lead"),
    "a negative lead": ({"law": "second-order", "lead": rule(0, -1, 0)}, 1, "lead"),
    "a prediction from an older version": (
        {"forward_reads": "entry", "forward_horizon": rule(0, 1, 0)},
        1,
        "forward_horizon",
    ),
    "a delay that the step cannot count": (
        {"law": "second-order", "forward_horizon": "counted"},
        0,
        "forward_horizon",
    ),
    "no stage on a device": ({"chunks": 0}, 0, "chunks"),
    "no window": ({"window": lambda k, n, m: 2 - k}, 2, "window"),
}


@pytest.mark.parametrize("what", INCONSISTENT)
def test_an_inconsistent_method(what):
    fields, stage, field = INCONSISTENT[what]
    with pytest.raises((TypeError, ValueError)) as caught:
        made(Method("own", "of a test", **fields))
    said = str(caught.value)
    assert "'own'" in said
    assert field in said
    assert f"stage {stage} of 3" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "zigzag"),
        ("forward_reads", "oldest"),
        ("law", "cubic"),
        ("backward", "guess"),
        ("families", ("lion",)),
    ],
)
def test_a_choice_that_does_not_exist(field, value):
    with pytest.raises(ValueError) as caught:
        made(Method("own", "of a test", **{field: value}))
    said = str(caught.value)
    assert field in said
    assert "'own'" in said
    assert (value[0] if isinstance(value, tuple) else value) in said


@pytest.mark.parametrize(
    ("window", "kind", "said"),
    [
        (0, ValueError, "stage 0"),
        ([2, 2, 0], ValueError, "stage 2"),
        ([2, 2], ValueError, r"expected one per stage \(3\), got 2"),
        (1.5, TypeError, "int"),
        (True, TypeError, "int"),
        ("narrow", ValueError, "'narrow'"),
        ([3, 2.0, 1], TypeError, "stage 1"),
    ],
    ids=str,
)
def test_a_window_that_is_none(window, kind, said):
    with pytest.raises(kind, match=rf"window.*{said}"):
        made("vanilla", window=window)


@pytest.mark.parametrize("window", [[1, 2, 1], [2, 2, 3]], ids=str)
def test_a_window_that_deadlocks(window):
    """A stage waits for more forwards than the previous stage sends ahead."""
    stage = next(k for k in (1, 2) if window[k] > window[k - 1])
    with pytest.raises(ValueError, match=rf"window.*stage {stage}"):
        made("vanilla", window=window)


@pytest.mark.parametrize("method", ["sync", "gpipe", "1f1b", "zb-h1", "xgrad"])
def test_a_window_where_there_is_none_to_choose(method):
    with pytest.raises(ValueError, match=rf"window.*'{method}'"):
        made(method, n=1, window=2)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (4, 3)])
def test_2bw_needs_as_many_microbatches_as_stages(n, m):
    with pytest.raises(ValueError, match=rf"'pipedream-2bw'.*at least {n} microbatches.*got {m}"):
        made("pipedream-2bw", n=n, microbatches=m)


def test_2bw_has_no_room_for_a_window_of_two_minibatches():
    with pytest.raises(ValueError, match=r"'pipedream-2bw'.*stage 0 of 3"):
        made("pipedream-2bw", microbatches=3, window=5)


def test_xgrad_is_for_one_device():
    with pytest.raises(ValueError, match=r"'xgrad'.*1.*got 3"):
        made("xgrad")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (sgd(), "smoothed"),
        (lambda params: st.optim.AdamW(params), "AdamW.*sgd"),
        (
            lambda params: st.optim.SGD(
                [{"params": params[:1], "smoothed": True}, {"params": params[1:]}],
                lr=0.1,
                momentum=0.9,
            ),
            "smoothed",
        ),
    ],
    ids=["a sum", "AdamW", "a group that sums"],
)
def test_spectrain_smoothed_needs_its_momentum(optimizer, said):
    with pytest.raises(ValueError, match=said) as caught:
        made("spectrain-smoothed", optimizer=optimizer)
    assert "'spectrain-smoothed'" in str(caught.value)


@pytest.mark.parametrize("method", ["spectrain", "msnag", "second-order", "xgrad"])
def test_a_prediction_needs_momentum(method):
    with pytest.raises(ValueError, match=r"momentum"):
        made(method, n=1 if method == "xgrad" else 3, optimizer=sgd(momentum=0.0))


def test_the_difference_of_weights_needs_no_momentum():
    assert len(losses(made("lwp-w", optimizer=sgd(momentum=0.0)), batches(5))) == 5


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({"clip_norm": 0.0}, ValueError, "clip_norm"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm"),
        ({"clip_norm": "1"}, TypeError, "clip_norm"),
        ({"clip_norm": 1.0, "clip_scope": "layer"}, ValueError, "clip_scope.*'layer'"),
        ({"master_dtype": torch.int32}, (TypeError, ValueError), "master_dtype"),
        ({"recompute": 1.0}, TypeError, "recompute"),
        ({"recompute": 0}, ValueError, "recompute"),
    ],
    ids=str,
)
def test_bad_settings(more, kind, said):
    with pytest.raises(kind, match=said):
        made("gpipe", **more)


def test_what_was_refused_left_everything_as_it_was():
    stages = tanh_stages(3)
    before = [p.detach().clone() for stage in stages for p in stage.parameters()]
    storages = [p.data_ptr() for stage in stages for p in stage.parameters()]
    for more in ({"window": [1, 2, 1]}, {"method": "xgrad"}):
        with pytest.raises(ValueError):
            st.Pipeline(stages, sgd(), mse, **{"method": "vanilla", **more})
    after = [p for stage in stages for p in stage.parameters()]
    assert [p.data_ptr() for p in after] == storages
    for p, old in zip(after, before, strict=True):
        assert torch.equal(p, old)


def test_a_method_is_checked_on_all_stages_before_any_optimizer_is_made():
    def optimizer(params):
        raise AssertionError("not yet")

    stages = [*tanh_stages(2), torch.nn.Tanh()]  # the last has nothing to train
    with pytest.raises(ValueError, match="method: lead of 'own' at stage 2 of 3"):
        st.Pipeline(stages, optimizer, mse, Method("own", "", lead=rule(0, 0, 1)))
