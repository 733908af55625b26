"""Tests user-defined generators and laws: the registered ones' bits, and errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import pytest
import torch
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401

import spectrain_ext as st
from spectrain_ext import laws
from spectrain_ext.method import Method, in_words, places_of
from spectrain_ext.schedule import backward, flushes, forward, name_of


def trained(method, optimizer=None, n=3, minibatches=6, **more):
    torch.manual_seed(0)
    stages = tanh_stages(n)
    pipe = st.Pipeline(stages, optimizer or sgd(), mse, method, **more)
    found = [loss.item() for loss in losses(pipe, batches(minibatches))]
    pipe.release()
    return found, [p.detach().clone() for stage in stages for p in stage.parameters()]


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


def last_first(place):
    """All forwards of a minibatch, then its backwards, the last microbatch's first."""
    m = place.microbatches
    for i in count():
        yield from chain.from_iterable(forward(place, i, j) for j in range(m))
        for j in reversed(range(m)):
            # the update follows the last microbatch's actions; here microbatch 0 is last
            yield from (a for a in backward(place, i, j) if a.kind.value != "update")
        yield backward(place, i, m - 1)[-1]


@dataclass(frozen=True)
class Half:
    """Half of the linear law's prediction."""

    steps: int

    def sgd(self, numbers):
        return [laws.Term(1.0, numbers.lr * self.steps / 2)]

    def adam(self, numbers):
        return [laws.Term(1.0, numbers.lr * self.steps / 2, 0.0, numbers.root(numbers.step))]


def early(place):
    return place.window - 1


# Equal bits


@pytest.mark.parametrize("make", [sgd(), lambda params: st.optim.AdamW(params, lr=0.05)])
@pytest.mark.parametrize(("law", "own"), [("linear", laws.Linear), ("geometric", laws.Geometric)])
@pytest.mark.parametrize("met", ["current", "stash", "predict"])
def test_a_law_that_is_a_named_one(law: str, own: Any, met: str, make: Any) -> None:
    again = (lambda place: 1) if met == "predict" else (lambda place: 0)
    fields = {"forward_horizon": early, "backward": met, "backward_horizon": again}
    ours, theirs = Method("own", "", law=own, **fields), Method("named", "", law=law, **fields)
    assert same(trained(ours, make), trained(theirs, make))


def test_half_as_far_is_what_half_the_horizon_gives():
    """Linear in s: half of two updates is one."""
    twice = Method("own", "", law=Half, forward_horizon=lambda place: 2 * early(place))
    once = Method("named", "", forward_horizon=early)
    assert same(trained(twice), trained(once))


def test_backwards_from_the_last_microbatch_on_are_synchronous_training():
    own = Method("own", "", schedule=last_first, window=lambda k, n, m: m)
    assert flushes(last_first)
    found, weights = trained(own, microbatches=2)
    expected, theirs = trained("gpipe", microbatches=2)
    assert found == pytest.approx(expected, rel=1e-12)
    for a, b in zip(weights, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="finishes every minibatch before the next"):
        trained(own, microbatches=2, window="wide")
    assert "nothing is late" in in_words(own, places_of(own, 3, 2))


def test_a_schedules_name_is_the_same_everywhere():
    class Callable:
        def __call__(self, place):
            return last_first(place)

    assert name_of("gpipe") == "gpipe"
    assert name_of(last_first).endswith("test_own.last_first")
    assert "Callable" in name_of(Callable())
    assert "0x" not in name_of(Callable())


# Errors


def tuples(place):
    for i in count():
        yield forward(place, i, 0)
        yield backward(place, i, 0)


def hasty(place):
    """Two forwards more than the window allows."""
    yield from chain.from_iterable(forward(place, i, 0) for i in range(place.window + 2))
    for i in count():
        yield from backward(place, i, 0)
        yield from forward(place, i + place.window + 2, 0)


def mixed(place):
    """The second minibatch's backward belongs to the first one's update."""
    for i in count(0, 2):
        yield from chain.from_iterable(forward(place, i + n, 0) for n in range(2))
        first, second = backward(place, i, 0), backward(place, i + 1, 0)
        yield from (*first[:-1], *second[:-1], first[-1], second[-1])


def waiting(place):
    """Stage 0 waits for a gradient before it sends the microbatch."""
    yield from backward(place, 0, 0)


def ending(place):
    yield from forward(place, 0, 0)
    yield from backward(place, 0, 0)


@dataclass(frozen=True)
class Greedy(Half):
    def sgd(self, numbers):
        return [laws.Term(1.0, 0.0, numbers.lr)]


class Listed(Half):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("field", "value", "kind", "said"),
    [
        ("schedule", tuples, TypeError, "yield from forward(place, i, j)"),
        ("schedule", hasty, ValueError, "the window allows 2 microbatches in flight"),
        ("schedule", mixed, ValueError, "expected update of minibatch 0 before it"),
        ("schedule", waiting, ValueError, "stage 2, "),
        ("schedule", ending, ValueError, "missing at the end"),
        ("schedule", 7, TypeError, "expected a name or a generator, got int"),
        ("law", lambda s: 2.0 * s, TypeError, "a function that gives a law (sgd, adam), got 2.0"),
        ("law", Greedy, ValueError, "takes the gradient"),
        ("law", Listed, TypeError, "a key of a dict, as a frozen dataclass can"),
        ("law", 7, ValueError, "one of linear, geometric, second-order, difference, average, got"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_schedules_and_laws_that_are_none(field, value, kind, said):
    window = (lambda k, n, m: 2) if value is mixed else None
    method = Method("own", "", **{field: value}, window=window)
    with pytest.raises(kind) as caught:
        trained(method if field == "schedule" else replace(method, forward_horizon=early))
    assert f"method: {field} of 'own': " in str(caught.value)
    assert said in str(caught.value)


def test_a_law_for_one_family_need_not_know_the_others():
    class ForSgd(Half):
        def adam(self, numbers):
            raise NotImplementedError

    method = Method("own", "", law=ForSgd, forward_horizon=early, families=("sgd",))
    assert trained(method)[0]
    with pytest.raises(ValueError, match="is defined for sgd"):
        trained(method, lambda params: st.optim.Adam(params))
