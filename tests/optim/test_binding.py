"""Tests an optimizer bound to a pipeline's buffers, and its writes there."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.optim_cases import assert_bits, bits, give_gradients, make_params, momenta, twins
from torch import Tensor, nn

import spectrain_ext as st


class Bound:
    """An optimizer bound to flat buffers, and an ordinary one with the same weights."""

    def __init__(self, master: bool, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        options = {"lr": 0.1, "momentum": 0.9, **options}
        self.params = make_params(dtype)
        self.twins = twins(self.params)
        self.optimizer = st.optim.SGD(self.params, **options)
        self.reference = st.optim.SGD(self.twins, **options)
        self.master = self.flat(copy_weights=True) if master else None
        self.momentum = self.flat()
        self.outs = self.flat()

    def flat(self, copy_weights: bool = False) -> dict[Tensor, Tensor]:
        """Return views of one buffer with NaN between them, in the parameters' layouts."""
        dtype = self.params[0].dtype
        starts = list(itertools.accumulate((p.numel() + 3 for p in self.params), initial=1))
        buffer = torch.full((starts[-1],), float("nan"), dtype=dtype)
        views = {
            p: buffer.as_strided(p.shape, p.stride(), start)
            for p, start in zip(self.params, starts, strict=False)
        }
        if copy_weights:
            for p, view in views.items():
                view.copy_(p.detach())
        return views

    def bind(self) -> None:
        self.optimizer.bind(self.master, {"momentum_buffer": self.momentum})

    @property
    def weights(self) -> list[Tensor]:
        return [p if self.master is None else self.master[p] for p in self.params]

    def step(self, none: Sequence[int] = ()) -> None:
        give_gradients(self.params, self.twins, none=none)
        self.optimizer.step()
        self.reference.step()

    def assert_equal(self) -> None:
        assert_bits(self.weights, bits(self.twins))
        for p, q in zip(self.params, self.twins, strict=True):
            ours = self.optimizer.state.get(p, {}).get("momentum_buffer")
            theirs = self.reference.state.get(q, {}).get("momentum_buffer")
            if theirs is None:
                assert ours is None
                assert (self.momentum[p] == 0).all()
            else:
                assert ours is self.momentum[p]
                assert torch.equal(ours, theirs)


@pytest.fixture(params=(True, False), ids=("master", "in place"))
def master(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def test_bound_steps_equal_unbound_steps(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    for step in range(5):
        pair.step(none=[0, 5] if step < 2 else [1])
        pair.assert_equal()


def test_binding_takes_the_momentum_along_and_unbinding_gives_it_back(master: bool) -> None:
    pair = Bound(master)
    for _ in range(2):
        give_gradients(pair.params, pair.twins, none=[3])
        pair.optimizer.step()
        pair.reference.step()
    if pair.master is not None:
        for p, view in pair.master.items():
            view.copy_(p.detach())
    pair.bind()
    pair.assert_equal()
    pair.step()
    pair.assert_equal()
    pair.optimizer.unbind()
    kept = bits([pair.optimizer.state[p]["momentum_buffer"] for p in pair.params])
    for view in pair.momentum.values():
        view.fill_(float("nan"))
    assert_bits(momenta(pair.optimizer, pair.params), kept)
    if pair.master is not None:
        with torch.no_grad():
            for p, view in pair.master.items():
                p.copy_(view)
    pair.master = None
    pair.step()
    assert_bits(pair.params, bits(pair.twins))


def test_bound_steps_leave_version_counters_alone(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    give_gradients(pair.params)
    versions = [p._version for p in pair.params]
    pair.optimizer.step()
    assert [p._version for p in pair.params] == versions


def test_with_a_master_the_parameters_themselves_are_not_written() -> None:
    pair = Bound(master=True)
    pair.bind()
    kept = bits(pair.params)
    pair.step()
    assert_bits(pair.params, kept)


def predictions(pair: Bound, steps: float) -> list[Tensor]:
    """Return the exact content of the outs: the module-level operator, row by row."""
    result = []
    for p, w in zip(pair.params, pair.weights, strict=True):
        lr = next(
            float(g["lr"]) for g in pair.optimizer.param_groups if any(p is q for q in g["params"])
        )
        w = w.detach()
        result.append(st.predict(w, pair.momentum[p], lr=lr, steps=steps))
    return result


@pytest.mark.parametrize("steps", (0, 1, 3.5))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_a_prediction_is_written_directly_and_with_the_next_step(
    master: bool, steps: float, dtype: torch.dtype
) -> None:
    pair = Bound(master, dtype)
    pair.bind()
    pair.optimizer.write_prediction(pair.outs, steps)
    assert_bits(list(pair.outs.values()), bits(pair.weights))
    for none in ([], [0], [], [0, 1, 2, 3, 4, 5], [5], []):
        pair.optimizer.write_with_next_step(pair.outs, steps)
        pair.step(none=none)
        pair.assert_equal()
        assert_bits(list(pair.outs.values()), predictions(pair, steps))
        kept = bits(list(pair.outs.values()))
        pair.optimizer.write_prediction(pair.outs, steps)
        assert_bits(list(pair.outs.values()), kept)
    # consumed: the next step leaves the outs unchanged
    kept = bits(list(pair.outs.values()))
    pair.step()
    pair.assert_equal()
    assert_bits(list(pair.outs.values()), kept)


def test_rows_without_a_gradient_or_a_buffer_are_predicted_too(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    pair.optimizer.write_with_next_step(pair.outs, 2)
    pair.step(none=[0, 4])
    assert torch.equal(pair.outs[pair.params[0]], pair.weights[0])
    assert_bits(list(pair.outs.values()), predictions(pair, 2))
    pair.step()
    pair.optimizer.write_with_next_step(pair.outs, 2)
    pair.step(none=[0, 4])
    assert not torch.equal(pair.outs[pair.params[0]], pair.weights[0])
    assert_bits(list(pair.outs.values()), predictions(pair, 2))


def test_predictions_use_the_learning_rate_of_the_moment() -> None:
    pair = Bound(master=True)
    pair.bind()
    pair.step()
    pair.optimizer.param_groups[0]["lr"] = 0.7
    pair.optimizer.write_prediction(pair.outs, 2)
    assert_bits(list(pair.outs.values()), predictions(pair, 2))


def test_groups_of_a_bound_optimizer() -> None:
    pair = Bound(master=True)
    pair.optimizer = st.optim.SGD(
        [{"params": pair.params[:3]}, {"params": pair.params[3:], "lr": 0.4, "nesterov": True}],
        lr=0.1,
        momentum=0.9,
    )
    pair.reference = st.optim.SGD(
        [{"params": pair.twins[:3]}, {"params": pair.twins[3:], "lr": 0.4, "nesterov": True}],
        lr=0.1,
        momentum=0.9,
    )
    pair.bind()
    for _ in range(3):
        pair.optimizer.write_with_next_step(pair.outs, 1.5)
        pair.step()
        pair.assert_equal()
        assert_bits(list(pair.outs.values()), predictions(pair, 1.5))


def test_momentum_zero_can_be_bound_and_copied_but_not_predicted(master: bool) -> None:
    pair = Bound(master, momentum=0.0)
    pair.bind()
    pair.optimizer.write_with_next_step(pair.outs, 0)
    pair.step()
    assert_bits(pair.weights, bits(pair.twins))
    assert_bits(list(pair.outs.values()), bits(pair.weights))
    assert not pair.optimizer.state
    kept = bits(list(pair.outs.values()))
    for predict in (pair.optimizer.write_prediction, pair.optimizer.write_with_next_step):
        with pytest.raises(ValueError, match="group 0 has momentum 0"):
            predict(pair.outs, 1)
    assert_bits(list(pair.outs.values()), kept)


def test_state_dict_of_a_bound_optimizer_is_independent_and_ordinary(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    pair.step(none=[1])
    state_dict = pair.optimizer.state_dict()
    reference = pair.reference.state_dict()
    assert state_dict["param_groups"] == reference["param_groups"]
    assert state_dict["state"].keys() == reference["state"].keys()
    for key, entry in state_dict["state"].items():
        saved = entry["momentum_buffer"]
        assert torch.equal(saved, reference["state"][key]["momentum_buffer"])
        assert saved.untyped_storage().nbytes() == saved.nbytes
    kept = bits([entry["momentum_buffer"] for entry in state_dict["state"].values()])
    pair.step()
    assert_bits([entry["momentum_buffer"] for entry in state_dict["state"].values()], kept)


def test_loading_keeps_the_binding(master: bool) -> None:
    pair = Bound(master)
    pair.bind()
    pair.step()
    saved = pair.optimizer.state_dict()
    saved["state"].pop(3)
    pair.step()
    pair.optimizer.load_state_dict(saved)
    pair.reference.load_state_dict(saved)
    pair.assert_equal()
    pair.optimizer.write_prediction(pair.outs, 2)
    assert_bits(list(pair.outs.values()), predictions(pair, 2))
    for _ in range(2):
        pair.step()
        pair.assert_equal()


@pytest.mark.parametrize("how", (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))))
def test_copies_of_a_bound_optimizer_are_unbound(how: Any) -> None:
    pair = Bound(master=False)
    pair.bind()
    pair.step()
    copied = how(pair.optimizer)
    copies = copied.param_groups[0]["params"]
    for p in copies:
        buffer = copied.state[p]["momentum_buffer"]
        assert buffer.untyped_storage().nbytes() == buffer.nbytes
    with pytest.raises(RuntimeError, match="not bound"):
        copied.unbind()
    give_gradients(pair.params, pair.twins, copies)
    pair.optimizer.step()
    pair.reference.step()
    copied.step()
    pair.assert_equal()
    assert_bits(copies, bits(pair.params))


def test_state_replaced_while_bound_is_adopted() -> None:
    pair = Bound(master=True)
    pair.bind()
    pair.step()
    first = pair.params[0]
    new = torch.full_like(first, 3.0).detach()
    pair.optimizer.state[first]["momentum_buffer"] = new
    pair.optimizer.write_prediction(pair.outs, 1)
    assert pair.optimizer.state[first]["momentum_buffer"] is pair.momentum[first]
    assert torch.equal(pair.momentum[first], new)
    assert_bits(list(pair.outs.values()), predictions(pair, 1))
    pair.optimizer.state.clear()
    pair.optimizer.write_prediction(pair.outs, 1)
    assert_bits(list(pair.outs.values()), bits(pair.weights))


def test_misuse_of_the_binding_raises_and_changes_nothing() -> None:
    pair = Bound(master=True)
    optimizer = pair.optimizer
    with pytest.raises(RuntimeError, match="not bound"):
        optimizer.unbind()
    with pytest.raises(RuntimeError, match="not bound"):
        optimizer.write_prediction(pair.outs, 1)
    last = pair.params[5]
    short = {p: v for p, v in pair.momentum.items() if p is not last}
    with pytest.raises(
        ValueError, match="momentum_buffer has no tensor for parameter 5 of group 0"
    ):
        optimizer.bind(pair.master, {"momentum_buffer": short})
    with pytest.raises(ValueError, match="master has no tensor for parameter 0"):
        optimizer.bind({}, {"momentum_buffer": pair.momentum})
    for bad in (torch.zeros(3).double(), torch.zeros(1031).int(), torch.zeros(2062).double()[::2]):
        with pytest.raises(ValueError, match="parameter 5 of group 0"):
            optimizer.bind(pair.master, {"momentum_buffer": {**pair.momentum, last: bad}})
    assert all(view.isnan().all() for view in pair.momentum.values())

    pair.bind()
    pair.step()
    with pytest.raises(RuntimeError, match="already"):
        pair.bind()
    with pytest.raises(RuntimeError, match="bound"):
        optimizer.predict_(1)
    with pytest.raises(RuntimeError, match="unbind"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    short_outs = {p: v for p, v in pair.outs.items() if p is not last}
    with pytest.raises(ValueError, match="outs has no tensor for parameter 5"):
        optimizer.write_prediction(short_outs, 1)
    with pytest.raises(ValueError, match="outs of parameter 5"):
        optimizer.write_prediction({**pair.outs, last: torch.zeros(2062).double()[::2]}, 1)
    for steps in (-1, float("nan")):
        with pytest.raises(ValueError, match="steps"):
            pair.optimizer.write_prediction(pair.outs, steps)
        with pytest.raises(ValueError, match="steps"):
            optimizer.write_with_next_step(pair.outs, steps)
    optimizer.write_with_next_step(pair.outs, 1)
    optimizer.write_with_next_step(None)
    pair.step()
    assert all(out.isnan().all() for out in pair.outs.values())

    optimizer.unbind()
    for use in (optimizer.write_prediction, optimizer.write_with_next_step):
        with pytest.raises(RuntimeError, match="not bound"):
            use(pair.outs, 1)


def test_momentum_that_becomes_zero_before_an_ordered_prediction() -> None:
    pair = Bound(master=True)
    pair.bind()
    pair.step()
    pair.optimizer.write_with_next_step(pair.outs, 1)
    pair.optimizer.param_groups[0]["momentum"] = 0.0
    kept = bits(pair.weights)
    give_gradients(pair.params)
    with pytest.raises(ValueError, match="group 0 has momentum 0"):
        pair.optimizer.step()
    assert_bits(pair.weights, kept)
    assert all(out.isnan().all() for out in pair.outs.values())


def test_a_failed_step_keeps_the_order_for_the_next() -> None:
    pair = Bound(master=True)
    pair.bind()
    pair.optimizer.write_with_next_step(pair.outs, 2)
    pair.optimizer.param_groups[0]["lr"] = -1.0
    give_gradients(pair.params)
    with pytest.raises(ValueError, match="lr"):
        pair.optimizer.step()
    pair.optimizer.param_groups[0]["lr"] = 0.1
    pair.step()
    pair.assert_equal()
    assert_bits(list(pair.outs.values()), predictions(pair, 2))


def test_bound_weights_that_move_are_noticed() -> None:
    pair = Bound(master=False)
    pair.bind()
    pair.step()
    pair.params[0].data = pair.params[0].data.clone()
    kept = bits(pair.params)
    give_gradients(pair.params)
    with pytest.raises(RuntimeError, match="no longer has the storage"):
        pair.optimizer.step()
    assert_bits(pair.params, kept)


def test_what_changes_between_two_steps() -> None:
    """A prepared call serves only the same numbers, law and cohorts."""
    bound = Bound(master=True)
    bound.bind()
    group = bound.optimizer.param_groups[0]
    same: list[Tensor | None] = [torch.ones_like(p) for p in bound.params]  # at one address
    cases: list[tuple[float, Any, list[Tensor | None] | None]] = [
        (0.1, 1.0, same),
        (0.1, 1.0, same),
        (0.1, 1.0, None),
        (0.2, 1.0, same),
        (0.2, 3.0, same),
        (0.2, None, same),
        (0.2, 3.0, [None, *same[1:]]),
        (0.2, 3.0, same),
        (0.2, st.laws.Geometric(2.0), same),
        (0.2, 0.0, same),
    ]
    for rate, steps, grads in cases:
        group["lr"] = bound.reference.param_groups[0]["lr"] = rate
        chosen = [torch.randn_like(p) for p in bound.params] if grads is None else grads
        for p, q, grad in zip(bound.params, bound.twins, chosen, strict=True):
            p.grad = q.grad = grad
        if steps is not None:
            bound.optimizer.write_with_next_step(bound.outs, steps)
        bound.optimizer.step()
        bound.reference.step()
        bound.assert_equal()
        v = [bound.momentum[p] for p in bound.params]
        if steps is not None:
            wanted = st.predict(bound.weights, v, lr=rate, steps=steps, momentum=0.9)
            assert_bits(list(bound.outs.values()), bits(wanted))
        for again in (1.0, 1.0, 2.0):
            bound.optimizer.write_prediction(bound.outs, again)
            wanted = st.predict(bound.weights, v, lr=rate, steps=again)
            assert_bits(list(bound.outs.values()), bits(wanted))
