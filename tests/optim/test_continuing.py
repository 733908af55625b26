"""Tests that saving, loading, copying and binding change no later step, and which state may be."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from helpers.covering import Axes, Row, neighbours, walks
from helpers.optim_cases import (
    ADAMS,
    BF16,
    EVERY,
    F16,
    F32,
    F64,
    assert_bits,
    assert_same,
    bits,
    buffers_for,
    every_adam,
    every_rival,
    flat_views,
    give_gradients,
    law_of,
    made,
    make_params,
    pair_of,
    refuses,
    state_of,
    trained,
    twins,
)
from torch import nn

import spectrain_ext as st

MATRICES = ("Muon", "SOAP")
OWN = ("Lion", *MATRICES)  # torch has none, or another
CASES = Axes(
    {
        "name": tuple(EVERY),
        "dtype": (F64, F32, BF16, F16),
        "state": (None, F32, BF16),  # dtype of momenta
        "flag": (None, "foreach", "fused", "capturable"),
        "master": (False, True),
        "law": (0, 2.5, st.laws.Geometric(3)),
    },
    [
        {"state": [F32], "dtype": [F64, F32]},
        {"state": [BF16], "dtype": [F64, BF16, F16]},
        {"name": OWN, "flag": ["foreach", "fused"]},
        {"name": ["SGD", "NAdam", *OWN], "flag": ["capturable"]},
        {"name": ["NAdam"], "flag": ["fused"]},
        {"name": MATRICES, "dtype": [F16]},
        {"name": ADAMS, "dtype": [F16], "state": [None]},  # a second moment would be 0
    ],
).covering()


class Pair:
    """An optimizer that is disturbed between steps, and one of the same weights that is not."""

    def __init__(self, case: Row) -> None:
        self.case, self.steps = case, 0
        self.flags = {} if case["flag"] is None else {case["flag"]: True}
        self.params = make_params(case["dtype"])
        self.twins = twins(self.params)
        self.reference = self.optimizer_of(self.twins)
        self.optimizer = self.optimizer_of(self.params, **self.flags)
        self.master: Any = None
        self.buffers: Any = None

    def optimizer_of(self, params: list[nn.Parameter], **options: Any) -> Any:
        options = {"state_dtype": self.case["state"], **options}
        if self.case["name"] in MATRICES:
            return made(self.case["name"], params, **options)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05, "weight_decay": 0.1}]
        return made(self.case["name"], groups, **options)

    @property
    def bound(self) -> bool:
        return self.buffers is not None

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p if self.master is None else self.master[p] for p in self.params]

    # Events.

    def read(self) -> None:
        """A state_dict does not change with the optimizer, which takes it back."""
        saved, whole = self.optimizer.state_dict()["state"], ("step", "mu_product")
        assert repr(self.optimizer).startswith(self.case["name"])
        tensors = [
            tensor
            for entry in saved.values()
            for key, tensor in entry.items()
            if self.bound or key in whole
        ]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
        kept, weights = bits(tensors), bits(self.weights)
        before = copy.deepcopy(self.optimizer.state_dict())
        give_gradients(self.params)
        self.optimizer.step()
        assert_bits(tensors, kept)
        for w, old in zip(self.weights, weights, strict=True):
            w.detach().copy_(old)
        self.optimizer.load_state_dict(before)

    def bind(self) -> None:
        if self.bound:
            self.unbind()
        wide = self.case["state"]
        self.buffers = buffers_for(self.optimizer, wide)
        if self.case["master"]:
            self.master = flat_views(self.params, filled=True)
        self.outs = flat_views(self.params)
        self.optimizer.stepper.bind(self.master, self.buffers)
        assert self.optimizer.stepper.is_bound_to(self.buffers)

    def unbind(self) -> None:
        if not self.bound:
            refuses(self.optimizer.stepper.unbind, RuntimeError, "not bound")
            return
        weights = bits(self.weights)
        self.optimizer.stepper.unbind()
        for views in (*self.buffers.values(), self.master or {}):
            for view in views.values():
                view.fill_(float("nan"))
        self.own(weights)

    def own(self, weights: list[torch.Tensor]) -> None:
        """Go on with unbound parameters."""
        self.master = self.buffers = None
        for p, w in zip(self.params, weights, strict=True):
            p.detach().copy_(w)

    def elsewhere(self) -> None:
        """The owner updates the weights in other tensors from now on."""
        if self.bound:
            old, self.master = self.weights, flat_views(self.params)
            for view, w in zip(self.master.values(), old, strict=True):
                view.copy_(w.detach())
            self.optimizer.stepper.update_in(self.master)

    def continue_in(self, optimizer: Any, weights: list[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        if self.case["name"] in MATRICES:  # matrices come first
            shapes = [p.shape for p in self.twins]
            self.params.sort(key=lambda p: shapes.index(p.shape))
        with pytest.raises(RuntimeError, match="not bound"):
            optimizer.stepper.unbind()
        self.own(weights)

    def saved(self) -> None:
        weights, params, file = bits(self.weights), make_params(self.case["dtype"]), io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        # That of saved state stays; from here on all parameters have some.
        dtype = None if self.steps > 3 and self.case["state"] != BF16 else self.case["state"]
        other = self.optimizer_of(params, lr=9.0, state_dtype=dtype, **self.flags)
        other.load_state_dict(torch.load(file, weights_only=True))
        self.continue_in(other, weights)

    def through_torch(self) -> None:
        weights, params = bits(self.weights), twins(self.params)
        name, exact = self.case["name"], self.case["dtype"] in (F32, F64)
        if name in OWN or not exact or (name == "NAdam" and self.case["dtype"] == F64):
            return  # torch casts state to the parameter's dtype, also NAdam's product
        theirs = getattr(torch.optim, name)([{"params": params[:2]}, {"params": params[2:]}], lr=9)
        theirs.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.optimizer.load_state_dict(theirs.state_dict())
        assert_bits(self.weights, weights)

    def deepcopied(self) -> None:
        self.continue_in(copy.deepcopy(self.optimizer), bits(self.weights))

    def pickled(self) -> None:
        self.continue_in(pickle.loads(pickle.dumps(self.optimizer)), bits(self.weights))

    # A step and its check.

    def step(self) -> None:
        none = [(1, 5), (5,), (1, 5), (), (0,), (0, 1, 2, 3, 4, 5)][self.steps % 6]
        self.steps += 1
        give_gradients(self.params, self.twins, none=none)
        if self.bound:
            for view in self.outs.values():
                view.fill_(7)
        orders = self.bound and self.steps % 3 > 0
        if orders:
            self.optimizer.stepper.step(write=(self.outs, law_of(self.case["law"])))
        else:
            self.optimizer.step()
        self.reference.step()
        assert_bits(self.weights, self.twins)
        found, expected = (
            state_of(*each)
            for each in ((self.optimizer, self.params), (self.reference, self.twins))
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert_bits((ours[key] for key in theirs), theirs.values())
        with self.reference.predicted(self.case["law"]):
            predicted = bits(self.twins)
        if not self.bound:
            with self.optimizer.predicted(self.case["law"]):
                assert_bits(self.params, predicted)
        else:
            untouched = [torch.full_like(w, 7) for w in predicted]
            assert_bits([self.outs[p] for p in self.params], predicted if orders else untouched)
            for view in self.outs.values():
                view.fill_(7)
            self.optimizer.stepper.predict(self.outs, law_of(self.case["law"]))
            assert_bits([self.outs[p] for p in self.params], predicted)
        assert_bits(self.weights, self.twins)


EVENTS = {
    "none": lambda pair: None,
    "read": Pair.read,
    "bound": Pair.bind,
    "unbound": Pair.unbind,
    "elsewhere": Pair.elsewhere,
    "saved": Pair.saved,
    "through torch": Pair.through_torch,
    "deepcopied": Pair.deepcopied,
    "pickled": Pair.pickled,
}
PROGRAMS = walks([*EVENTS], [lambda event: True] * len(CASES), 12)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_changes_no_later_step(number: int) -> None:
    case, program = CASES[number], PROGRAMS[number]
    pair = Pair(case)
    for done, event in enumerate(program):
        try:
            EVENTS[event](pair)
            pair.step()
        except Exception as error:
            error.add_note(f"{case}\nafter {program[:done]}: {event}")
            raise


def test_every_event_follows_every_other() -> None:
    assert {(a, b) for a in EVENTS for b in EVENTS} == neighbours(PROGRAMS)


# State of other dtypes, kinds of counts and keys


def momenta(optimizer: Any, params: Any) -> list[Any]:
    return [optimizer.state.get(p, {}).get("momentum_buffer") for p in params]


def step_alike(first: Any, second: Any) -> None:
    """Assert that two optimizers, each with its parameters, make the same step."""
    give_gradients(first[0], second[0])
    for _, optimizer in (first, second):
        optimizer.step()
    assert_bits(second[0], first[0])
    found, expected = (state_of(optimizer, params) for params, optimizer in (second, first))
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert_bits((a[key] for key in b), b.values())


def test_loading_over_existing_state_and_missing_state() -> None:
    ours, optimizer = trained()
    optimizer.load_state_dict(made("SGD", make_params(), lr=0.5).state_dict())
    assert momenta(optimizer, ours) == [None] * len(ours)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("saved", "dtype", "asked", "loaded"),
    [
        (BF16, BF16, F32, F32),
        (F32, BF16, BF16, BF16),
        (F32, F16, None, F32),
        (F32, BF16, F32, F32),
        (F32, F64, None, F64),
        (F64, BF16, None, BF16),
        (F16, BF16, None, BF16),
        (BF16, F32, None, F32),
        (BF16, F32, BF16, BF16),
        (F32, F32, BF16, BF16),
    ],
    ids=str,
)
def test_loading_casts_what_must_be_cast(
    saved: torch.dtype, dtype: torch.dtype, asked: torch.dtype | None, loaded: torch.dtype
) -> None:
    _, source = trained(dtype=saved)
    params = make_params(dtype)
    optimizer = made("SGD", params, state_dtype=asked)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.load_state_dict(source.state_dict())
    # Where the moments gain or lose bits, and nothing else has told so.
    converts = saved != loaded and {saved, loaded} == {BF16, F32}
    assert bool(said) is converts
    for each in said:
        assert f"{saved}, those of this optimizer {loaded}: they are converted" in str(each.message)
    assert {v.dtype for v in momenta(optimizer, params)} == {loaded}
    assert {optimizer.stepper.state_dtype(p, p.dtype) for p in params} == {loaded}
    give_gradients(params)
    optimizer.step()
    assert {v.dtype for v in momenta(optimizer, params)} == {loaded}


def test_load_state_dict_hooks_run() -> None:
    _, optimizer = trained()
    params = make_params()
    other, seen = made("SGD", params), list[Any]()

    def pre(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state_dict)
        state["state"][0]["momentum_buffer"].fill_(5.0)
        return state

    other.register_load_state_dict_pre_hook(pre)
    other.register_load_state_dict_post_hook(lambda opt: seen.append(momenta(opt, params)[0]))
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2
    assert (seen[0] == 5.0).all()


@every_adam
@pytest.mark.parametrize("kind", ["number", "wide", "one element"])
def test_counts_of_other_kinds_are_loaded(name: str, kind: str) -> None:
    params, optimizer = trained(name)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        step = entry["step"].item()
        entry["step"] = {
            "number": int(step),
            "wide": torch.tensor(step, dtype=F64),
            "one element": torch.tensor([step]),
        }[kind]
    copies = twins(params)
    copied = made(name, copies)
    copied.load_state_dict(saved)
    step_alike((params, optimizer), (copies, copied))


@every_adam
def test_state_made_before_the_first_step(name: str) -> None:
    """Some frameworks make the state in advance, with a count of 0."""
    params = make_params()
    theirs, optimizer, reference = pair_of(name, params)
    for p in params:
        state = {"step": torch.tensor(0.0)}
        state |= {key: torch.zeros_like(p).detach() for key in optimizer.stepper.buffer_keys}
        optimizer.state[p].update(state)
        if name == "NAdam":
            optimizer.state[p]["mu_product"] = torch.tensor(1.0)
    kept = bits(params)
    with optimizer.predicted(3):
        assert_bits(params, kept)
    for _ in range(3):
        give_gradients(params, theirs)
        optimizer.step()
        reference.step()
    assert_same(params, theirs)


@every_rival
def test_state_of_other_names_is_kept(name: str) -> None:
    """In its own dtype, such as what a hook of the step keeps there."""
    params, optimizer = trained(name, BF16)
    saved = optimizer.state_dict()
    saved["state"][0].update(note=7, average=torch.ones(2))
    optimizer.load_state_dict(saved)
    give_gradients(params)
    optimizer.step()
    for entry in (optimizer.state[params[0]], optimizer.state_dict()["state"][0]):
        assert entry["note"] == 7
        assert torch.equal(entry["average"], torch.ones(2))


def test_the_extras_of_sgd_are_keys_of_the_groups_only_where_asked_for() -> None:
    reference = torch.optim.SGD(make_params(), lr=0.1, momentum=0.9)
    plain, extra = made("SGD", make_params()), made("SGD", make_params(), smoothed=True)
    assert "smoothed" not in plain.param_groups[0]
    extra.load_state_dict(reference.state_dict())  # which has no such key
    extra.add_param_group({"params": make_params()})
    for each in (extra, copy.deepcopy(extra)):
        assert [group["smoothed"] for group in each.param_groups] == [True, True]
        assert each.param_groups[0]["momentum"] == 0.9
    reference.add_param_group({"params": make_params()})
    reference.load_state_dict(extra.state_dict())
