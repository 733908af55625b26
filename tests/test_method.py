"""The methods by name, and their formulas."""

from __future__ import annotations

import dataclasses

import pytest

from spectrain_ext.method import Method, find_method, methods


def test_names():
    assert methods() == ("sync", "vanilla", "pipedream", "spectrain", "spectrain-stash")
    for name in methods():
        method = find_method(name)
        assert method.name == name
        assert method.summary
        assert find_method(method) is method


def test_the_papers_horizons():
    method = find_method("spectrain")
    n = 8
    assert [method.forward_horizon(k, n) for k in range(n)] == [7, 6, 6, 5, 5, 4, 4, 3]
    assert [method.backward_horizon(k, n) for k in range(n)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert method.backward == "predict"
    assert [method.window(k, n) for k in range(n)] == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("name", "window", "horizon", "backward"),
    [
        ("sync", 1, 0, "current"),
        ("vanilla", 3, 0, "current"),
        ("pipedream", 3, 0, "stash"),
        ("spectrain-stash", 3, 2, "stash"),
    ],
)
def test_the_other_rows_at_stage_1_of_4(name, window, horizon, backward):
    method = find_method(name)
    assert method.window(1, 4) == window
    assert method.forward_horizon(1, 4) == horizon
    assert method.backward == backward


def test_a_method_is_a_value():
    method = find_method("spectrain")
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.name = "other"
    own = dataclasses.replace(method, name="own", backward="stash")
    assert isinstance(own, Method)
    assert find_method(own) is own


def test_unknown_methods():
    with pytest.raises(ValueError, match=r"no 'gpipe'; there are sync, vanilla, pipedream"):
        find_method("gpipe")
    with pytest.raises(TypeError, match="expected a name or a Method, got int"):
        find_method(3)
