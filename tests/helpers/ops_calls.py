"""Makes every call of the operators and predicts its effects: inner, as `Rate` and groups are.

A call on a `World` of tensors must have the bits of ops_reference.py and change nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ops_options as names
from helpers import ops_reference as ref
from helpers.covering import Axes
from helpers.covering import Row as Options
from helpers.ops_options import IN_MEMORY, PLANS
from helpers.ops_tensors import Effects, World

import spectrain_ext as st
from spectrain_ext import laws
from spectrain_ext.operators import calls
from spectrain_ext.operators.numbers import Rate, StepCount


def in_memory(value: float, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    """Return a learning rate that a kernel reads; on the CPU none is taken as such by itself."""
    tensor = torch.tensor(value, dtype=dtype, device=device)
    return Rate(tensor) if device == "cpu" else tensor


class GroupPlan(st.Plan):
    """A plan of parameter groups, as an optimizer's launches are, with a plan's methods."""

    def __init__(self, groups: Sequence[int], *args: Any, **lists: Any) -> None:
        plan = calls.Lists.plan
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls.Lists, "plan", lambda self: plan(self, groups))
            super().__init__(*args, **lists)
        self._groups = 1 + max(groups)

    def _laws(self, horizon: Any) -> Any:
        horizons = horizon if isinstance(horizon, tuple) else [horizon] * self._groups
        return None if horizon is None else [laws.as_law(each) for each in horizons]

    def _prediction(self, steps: Any, numbers: dict[str, Any]) -> Any:
        return calls.prediction(numbers["numbers"], self._laws(steps))

    def step(
        self, numbers: Any, *, predict: Any = (), first_step: Any = False, **options: Any
    ) -> None:
        laws_of = [self._laws(each) for each in predict]
        step = calls.step_arguments(numbers, laws_of, first_step is True)
        self._native.step(*step, first_step, options, None)


class _Call:
    """The numbers and laws of a call: of each group and tensor, and as arguments."""

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.groups = [names.numbers_of(options, world.rng) for _ in range(world.n_groups)]
        self.own = [self.groups[group] for group in world.groups]  # of each tensor
        self.kind = self.groups[0].rule
        self.steps: dict[int, Any] = {}  # step counts that a kernel reads, by group
        self.rates: list[Any] = [numbers.lr for numbers in self.groups]
        if options["lr"] == "of numpy":
            self.rates = [np.float32(rate) for rate in self.rates]
        if options["lr"] in IN_MEMORY:  # of some groups
            for k in range(0, world.n_groups, 2):
                dtype = IN_MEMORY[options["lr"]]
                if self.kind == "adam" and world.rng.random() < 0.5:
                    step = torch.tensor([self.groups[k].step], dtype=dtype, device=world.device)
                    self.steps[k] = StepCount(step) if world.device == "cpu" else step
                    if world.rng.random() < 0.5:  # that alone
                        continue
                self.rates[k] = in_memory(self.rates[k], dtype, world.device)

    def numbers(self) -> list[Any]:
        """Return the numbers of each group as a plan takes them."""
        pairs = enumerate(zip(self.groups, self.rates, strict=True))
        return [replace(numbers, lr=rate, **self._step(k)) for k, (numbers, rate) in pairs]

    def _step(self, group: int) -> dict[str, Any]:
        return {"step": self.steps[group]} if group in self.steps else {}

    def keywords(self) -> dict[str, Any]:
        """Return the numbers, the same for all groups, as arguments of a function."""
        return {**ref.keywords(self.groups[0]), "lr": self.rates[0], **self._step(0)}

    def horizon(self, horizon: laws.Horizon, index: int) -> Any:
        """Return a horizon for every group, or in odd places a tuple of different ones."""
        if self.world.n_groups == 1 or index % 2 == 0:
            return horizon
        return horizon, 1.0, laws.Linear(0.0)

    def terms(self, group: int, horizon: Any, *, first: bool = False) -> list[laws.Term]:
        """Return the terms of a prediction for a group, by a first step or a later one."""
        own = self.groups[group]
        law = horizon[group] if isinstance(horizon, tuple) else horizon
        law = law if hasattr(law, "sgd") else laws.Linear(law)
        if not isinstance(own, laws.SgdNumbers):
            return law.adam(own) if isinstance(own, laws.AdamNumbers) else law.lion(own)
        if isinstance(law, laws.SecondOrder) and first and ref.gain(own) != 1.0:
            # v is set to d, and was 0 before.
            law = laws.Linear(law.delay + law.lead + law.delay * (law.delay + 1.0) / 2.0)
        return law.sgd(own)


def _plan(world: World, kind: str) -> st.Plan:
    if kind not in world.plans:
        if world.way == "groups":
            world.plans[kind] = GroupPlan(world.groups, **world.lists_of_plan(kind))
        else:
            world.plans[kind] = st.Plan(**world.lists_of_plan(kind))
    return world.plans[kind]


def check_step(world: World, options: Options) -> None:
    """Make a step of SGD, Adam or Lion with predictions."""
    world.take_gradients(options["missing"])
    call, first = _Call(world, options), world.draw(options["first"])
    asked = names.WRITTEN[options["predictions"]]
    horizons = [None if x is None else call.horizon(x, j) for j, x in enumerate(asked)]
    gate, seed, zero_grad = names.GATES[options["gate"]], options["seed"], options["zero_grad"]
    skips = gate.get("found_inf", 0.0) != 0.0
    factor = 1.0
    if not skips:
        clip, scale = (np.float32(gate.get(x, 1.0)) for x in ("clip_factor", "grad_scale"))
        factor = float(clip) / float(scale)
    state_names = ["momentum", "second"] if call.kind == "adam" else ["momentum"]
    if options["rule"] == "SGD without momentum":
        state_names = []
    effects: Effects = {}
    more: dict[str, Any]
    directions, position = [], 0
    for i, numbers in enumerate(call.own):
        w, g = world.flat("params", i), world.flat("grads", i)
        directions.append(ref.direction(numbers, w, g, factor))
        if not world.missing[i]:
            if zero_grad:
                effects["grads", i] = torch.zeros_like(g), True
            if not skips:
                state = [world.flat(name, i) for name in state_names]
                more = {"first": first[i], "factor": factor, "seed": seed, "position": position}
                new = ref.step(numbers, w, g, state, **more)
                for name, values in zip(["params", *state_names], new, strict=True):
                    effects[name, i] = values, False
        position += w.numel()

    def with_predictions() -> Effects:
        for j, horizon in enumerate(horizons):
            for i, numbers in enumerate(call.own):
                if horizon is None or skips:
                    continue
                w, state = world.flat("params", i), [world.flat(name, i) for name in state_names]
                terms = call.terms(world.groups[i], horizon, first=options["first"] == "all")
                terms = [] if world.missing[i] else terms
                dtype = world.lists[f"out{j}"].flat[i].dtype
                hat = ref.predict(numbers, terms, w, state, directions[i], dtype)
                effects[f"out{j}", i] = hat, not terms and dtype == w.dtype
        return effects

    shape = [(), (1,), (1, 1)][int(world.rng.integers(3))]
    more = {
        name: torch.full(shape, value, dtype=torch.float32, device=world.device)
        for name, value in gate.items()
    }
    more |= {"zero_grad": True} if zero_grad else {}
    more |= {} if seed is None else {"rounding_seed": seed}
    if options["first"] != "no":
        more["first_step"] = first if options["first"] == "some" else True
    written = ["params", *state_names, *world.outs[: len(asked)], *(["grads"] if zero_grad else [])]
    make = partial(_step, world, call, horizons, more, bool(state_names))
    world.check(f"step {options}", make, with_predictions, written)


def _step(
    world: World, call: _Call, horizons: list[Any], more: dict[str, Any], buffers: bool
) -> None:
    name = f"{call.kind}_step_"
    if world.way in PLANS:
        plan: Any = _plan(world, call.kind)
        if world.way == "groups":
            plan.step(call.numbers(), predict=horizons, **more)
        else:
            getattr(plan, name)(**call.keywords(), predict=horizons, **more)
        return
    outs = [world.argument(name) for name in world.outs[: len(horizons)]]
    lists = [world.argument("params"), world.grads(), world.argument("momentum")]
    lists += [world.argument("second")] if call.kind == "adam" else []
    if not buffers and world.rng.random() < 0.5:
        lists[2] = None
    predict = list(zip(horizons, outs, strict=True))
    getattr(st, name)(*lists, **call.keywords(), predict=predict, **more)


def check_prediction(world: World, options: Options) -> None:
    """Predict weights in place, to an output, or with a stash."""
    call, name = _Call(world, options), options["call"]
    horizon = call.horizon(names.LAWS[options["law"]], int(world.rng.integers(2)))
    new = name == "predict" and options["output"] == "another" and world.way not in PLANS
    target = "params" if name != "predict" else "out1" if options["output"] == "another" else "out0"
    effects: Effects = {}
    made = []
    terms = [call.terms(group, horizon) for group in range(world.n_groups)]
    for i, numbers in enumerate(call.own):
        w, state = world.flat("params", i).clone(), world.state(i, call.kind)
        dtype = w.dtype if new else world.lists[target].flat[i].dtype
        hat = ref.predict(numbers, terms[world.groups[i]], w, state, None, dtype)
        made.append((hat, not any(terms) and dtype == w.dtype))
        effects[target, i] = made[-1]
        if name == "stash_predict_":
            effects["stashed", i] = w, True
    what = f"prediction {options}"
    _check(world, what, effects, made, new, partial(_predict, world, call, options, horizon, new))


def _predict(world: World, call: _Call, options: Options, horizon: Any, new: bool) -> Any:
    name, numbers = options["call"], call.keywords()
    out = "out1" if options["output"] == "another" else "out0"
    if options["numbers"] == "lr only":
        numbers = {"lr": numbers["lr"]}
    if world.way in PLANS:
        more = {"out": world.outs.index(out)} if name == "predict" else {}
        numbers = {"numbers": call.numbers()} if world.way == "groups" else numbers
        return getattr(_plan(world, call.kind), name)(steps=horizon, **numbers, **more)
    taken = ["lr", "momentum", "weight_decay", "nesterov"]
    lists = (
        ["params", "stashed", "momentum"] if name == "stash_predict_" else ["params", "momentum"]
    )
    more = {"out": world.argument(out)} if name == "predict" and not new else {}
    if call.kind == "adam":
        name, lists = "adam_predict", [*lists, "second"]
        taken = ["lr", "step", "betas", "eps", "weight_decay", "decoupled_weight_decay"]
    elif call.kind == "lion":
        name, taken = "lion_predict", ["lr", "betas", "weight_decay"]
    numbers = {key: numbers[key] for key in taken if key in numbers}
    return _call(world, name, lists, {**numbers, "steps": horizon}, more)


def _call(
    world: World, name: str, lists: list[str], numbers: dict[str, Any], out: dict[str, Any]
) -> Any:
    arguments = [world.argument(name) for name in lists]
    result = getattr(st, name)(*arguments, **numbers, **out)
    assert not out or result is out["out"]
    return result


def check_copy(world: World, options: Options) -> None:
    """Copy, exchange, extrapolate or compare versions of the weights."""
    name, another = options["call"], options["output"] == "another"
    new = name in ("stash", "extrapolate") and another and world.way not in PLANS
    out = "out1" if another else "out0"
    effects: Effects = {}
    for i in range(world.n):
        w, kept = world.flat("params", i).clone(), world.flat("stashed", i).clone()
        dtype = world.lists[out].flat[i].dtype
        if name in ("stash", "swap_"):
            effects["stashed", i] = w, True
        if name in ("restore_", "swap_"):
            effects["params", i] = kept, True
        if name == "write_out":
            effects[out, i] = w.to(dtype), dtype == w.dtype
        if name == "extrapolate":
            hat = ref.extrapolate(w, kept, options["steps"], dtype)
            effects[out, i] = hat, not options["steps"] and dtype == w.dtype
    what, made = f"copy {options}", list(effects.values())
    result = _check(world, what, effects, made, new, partial(_copy, world, options, out, new))
    if name == "distance":
        w = [world.flat("params", i) for i in range(world.n)]
        kept_too = [world.flat("stashed", i) for i in range(world.n)], w
        norms = np.stack([ref.distance(w, other) for other in kept_too])
        ref.assert_same(result, torch.from_numpy(norms), what)


def _copy(world: World, options: Options, out: str, new: bool) -> Any:
    name = options["call"]
    numbers: dict[str, Any] = {"steps": options["steps"]} if name == "extrapolate" else {}
    if world.way in PLANS:
        if name in ("extrapolate", "write_out"):
            numbers["out"] = world.outs.index(out)
        return getattr(_plan(world, str(world.rng.choice(["sgd", "adam", "lion"]))), name)(
            **numbers
        )
    if name == "distance":
        w, kept = world.argument("params"), world.argument("stashed")
        each, total = st.distance(w, [kept, w])
        return torch.cat([each, total[:, None]], dim=1)
    lists = ["params"] if name == "stash" else ["params", "stashed"]
    if new or name not in ("stash", "extrapolate"):
        return _call(world, name, lists, numbers, {})
    written = world.argument("stashed" if name == "stash" else out)
    return _call(world, name, lists, numbers, {"out": written})


def _check(
    world: World,
    what: str,
    effects: Effects,
    made: Sequence[Any],
    new: bool,
    call: Callable[[], Any],
) -> Any:
    """Check a call with these effects, or one that returns them in new tensors."""
    written = [] if new else list(dict.fromkeys(name for name, _ in effects))
    result = world.check(what, call, lambda: {} if new else effects, written)
    if new:
        world.check_new(what, result, made)
    return result


PRODUCTS: dict[str, tuple[Callable[[World, Options], None], Axes]] = {
    "step": (check_step, Axes(names.STEPS, names.EXCLUDED_STEPS)),
    "prediction": (check_prediction, Axes(names.PREDICTIONS, names.EXCLUDED_PREDICTIONS)),
    "copy": (check_copy, Axes(names.COPIES, names.EXCLUDED_COPIES)),
}
