"""Makes every call of the operators and predicts its effects: inner, because a rate of the CPU is.

Options choose an operator's rule, the way it is called, and its arguments. `PRODUCTS`
has the factors of three kinds of calls, the combinations that do not exist, and a function that
makes a call on a `World` of tensors: it must have the bits of ops_reference.py and change nothing
else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from helpers import ops_reference as ref
from helpers.ops_covering import Excluded, Factors, Options
from helpers.ops_reference import Numbers
from helpers.ops_tensors import KINDS, LAYOUTS, GuardedList, shape_of, versions
from torch import Tensor

import spectrain_ext as st
from spectrain_ext.operators.laws import (
    Adam,
    Geometric,
    Horizon,
    Law,
    Linear,
    SecondOrder,
    Sgd,
    Term,
)
from spectrain_ext.operators.numbers import Rate

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Types(NamedTuple):
    """The types of a parameter's tensors; output j has type j, over and over."""

    weights: torch.dtype
    grads: torch.dtype
    state: torch.dtype
    outs: tuple[torch.dtype, ...]


DTYPES = {
    "float32": [Types(F32, F32, F32, (F32,))],
    "float64": [Types(F64, F64, F64, (F64,))],
    "float16": [Types(F16, F16, F16, (F16,))],
    "bfloat16": [Types(BF16, BF16, BF16, (BF16,))],
    "float16 with float32 state": [Types(F16, F16, F32, (F16,))],
    "bfloat16 with float32 state": [Types(BF16, BF16, F32, (BF16,))],
    "float16 beside float32": [Types(F32, F16, F32, (F16,))],
    "bfloat16 beside float32": [Types(F32, BF16, F32, (BF16,))],
    "outputs of three types": [Types(F32, F32, F32, (BF16, F32, F16))],
    "all": [
        Types(F32, F32, F32, (F32,)),
        Types(F64, F64, F64, (F64,)),
        Types(F16, F16, F32, (F16,)),
        Types(BF16, BF16, BF16, (BF16,)),
        Types(F32, BF16, F32, (F32, BF16)),
        Types(F32, F16, F32, (F16,)),
    ],
}
_NARROW = ["float16 beside float32", "bfloat16 beside float32", "outputs of three types", "all"]
_SIZES = {
    "none": [],
    "one element": [1],
    "nine": [9],
    "vectors": [0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 255, 511],
    "chunks": [1023, 1025, 4095, 4101, 0, 8200],
    "many": [i % 9 for i in range(45)],
    "parallel": [60_003, 5],
    "streamed": [600_011],  # outputs bypass the cache
}
_ONE = ["one tensor", "plan of one tensor"]
_PLANS = ["plan", "plan of one tensor", "groups"]
_NO_PLANS = ["function", "one tensor", "torch.ops"]
#: Factors of every product: how an operator is called, and on which tensors.
_COMMON = {
    "way": ("function", "one tensor", "torch.ops", "plan", "plan of one tensor", "groups"),
    "dtypes": tuple(DTYPES),
    "layout": LAYOUTS,
    "sizes": tuple(size for size in _SIZES if size not in ("nine", "streamed")),
    "values": KINDS,
    "threads": (1, 2, 5),
}
_EXCLUDED = [
    {"way": _ONE, "sizes": ["none", "many"]},
    {"way": _ONE, "layout": ["adjacent", "nearly adjacent", "backwards"]},
    {"way": ["groups"], "sizes": ["none"]},  # the last group has a tensor
]

_IN_MEMORY = {"float32 in memory": F32, "float64 in memory": F64}
_LR = ("ordinary", "zero", "vanishing", "huge", "of numpy", *_IN_MEMORY)


class _Own(Law):
    """A law of a user."""

    def sgd(self, numbers: Sgd) -> list[Term]:
        return [Term(0.75, numbers.lr * 0.5)]

    def adam(self, numbers: Adam) -> list[Term]:
        return [Term(0.5, 0.25, 0.0, 2.0), Term(1.0, 0.125)]


_SECOND = SecondOrder(2.0, 1.0)
#: Predictions that a step writes.
_WRITTEN: dict[str, list[Horizon | None]] = {
    "none": [],
    "linear": [2.0],
    "some outputs": [None, 2.5, None],
    "geometric": [Geometric(3), 0, Geometric(0)],
    "own law": [_Own(), Linear(0.0)],
    "second order": [1.0, _SECOND],
    "two passes": [float(j % 5) for j in range(10)],
    "second order in two passes": [1.0] * 9 + [_SECOND],
    "many terms": [Geometric(40), Geometric(1), Geometric(40)],
}
#: Scalars in memory of the device.
GATES: dict[str, dict[str, float]] = {
    "none": {},
    "scale": {"grad_scale": 3.7},
    "clip": {"clip_factor": 0.3},
    "scale and clip": {"grad_scale": 32.0, "clip_factor": 4.0, "found_inf": 0.0},
    "skip": {"found_inf": 1.0, "grad_scale": 0.0},
    "skip by NaN": {"found_inf": math.nan, "clip_factor": 2.0},
}
_SGD_RULES = ("SGD", "undamped SGD", "dampened SGD", "Nesterov", "smoothed", "smoothed Nesterov")
_ADAM_RULES = ("Adam", "NAdam")
_STEPS = {
    "rule": ("SGD without momentum", *_SGD_RULES, *_ADAM_RULES),
    **_COMMON,
    "lr": _LR,
    "predictions": tuple(_WRITTEN),
    "decay": ("no", "L2", "decoupled"),
    "maximize": (False, True),
    "first": ("no", "all", "some"),
    "missing": ("no", "all", "some"),
    "gate": tuple(GATES),
    "zero_grad": (False, True),
    "seed": (None, 5, -1, 2**63 + 4),
}
_BY_SECOND = ["second order", "second order in two passes"]
_EXCLUDED_STEPS = [
    *_EXCLUDED,
    {"rule": ["SGD without momentum"], "predictions": [x for x in _WRITTEN if x != "none"]},
    {"rule": ["SGD without momentum", *_ADAM_RULES], "first": ["all", "some"]},
    {"rule": _ADAM_RULES, "lr": list(_IN_MEMORY)},
    {"way": _NO_PLANS, "predictions": ["some outputs"]},
    {"way": ["plan of one tensor"], "missing": ["all", "some"]},  # None: they are not known yet
    {"way": ["torch.ops"], "predictions": ["own law"]},
    {"way": ["torch.ops"], "zero_grad": [True]},
    {"way": ["torch.ops"], "seed": [2**63 + 4]},  # a schema's integers are signed
    {"seed": [5, -1, 2**63 + 4], "dtypes": [x for x in DTYPES if not x.startswith("bfloat16")]},
    {"seed": [5, -1, 2**63 + 4], "dtypes": ["bfloat16 beside float32"]},
    # Refused: tests of their own.
    {"first": ["some"], "predictions": _BY_SECOND},
    {"lr": list(_IN_MEMORY), "predictions": ["geometric", "many terms"]},
]

_NO_DELAY = "second order without delay"
_LAWS: dict[str, Horizon] = {
    "no step": 0,
    "linear": 2,
    "fraction": np.float64(2.5),
    "geometric": Geometric(3),
    "geometric of no step": Geometric(0),
    _NO_DELAY: SecondOrder(0.0, 2.0),
    "own": _Own(),
}
_BY_MOMENTUM = ["geometric", "geometric of no step", _NO_DELAY, "own"]
_PREDICTIONS = {
    "call": ("predict_", "predict", "stash_predict_"),
    "rule": ("SGD", "Nesterov", "smoothed", *_ADAM_RULES),
    **_COMMON,
    "lr": _LR,
    "law": tuple(_LAWS),
    "decay": ("no", "L2", "decoupled"),
    "numbers": ("all", "lr only"),
    "output": ("given", "another"),  # of several in a plan; a new one of a function
}
_EXCLUDED_PREDICTIONS = [
    *_EXCLUDED,
    {"way": _NO_PLANS, "rule": ["smoothed", "NAdam"]},
    {"way": _NO_PLANS, "rule": ["SGD", "Nesterov"], "decay": ["decoupled"]},
    {"way": _NO_PLANS, "rule": ["Adam"], "call": ["predict_", "stash_predict_"]},
    {"way": ["torch.ops"], "law": ["own"]},
    {"rule": _ADAM_RULES, "lr": list(_IN_MEMORY)},
    {"numbers": ["lr only"], "law": _BY_MOMENTUM},
    {"numbers": ["lr only"], "rule": [*_ADAM_RULES, "Nesterov", "smoothed"]},
    {"numbers": ["lr only"], "decay": ["L2", "decoupled"]},
    {"lr": list(_IN_MEMORY), "law": ["geometric"], "decay": ["L2", "decoupled"]},
    {"lr": list(_IN_MEMORY), "law": ["geometric"], "rule": ["Nesterov"]},  # see test_rates.py
]

_COPIES = {
    "call": ("stash", "restore_", "swap_", "write_out", "extrapolate", "distance"),
    **_COMMON,
    "output": ("given", "another"),
    "steps": (0, 1, 2.5),
}
_EXCLUDED_COPIES = [
    *_EXCLUDED,
    {"call": ["write_out"], "way": _NO_PLANS},
    {"call": ["distance"], "way": _PLANS},
    {"call": ["extrapolate"], "dtypes": _NARROW},
]


def in_memory(value: float, dtype: torch.dtype = F64, device: str = "cpu") -> Any:
    """Return a learning rate that a kernel reads; on the CPU none is taken as such by itself."""
    tensor = torch.tensor(value, dtype=dtype, device=device)
    return Rate(tensor) if device == "cpu" else tensor


# Tensors.

#: What a call changes: for lists, for some of their tensors, the new elements in memory order, and
#: whether a NaN keeps its bits.
Effects: TypeAlias = dict[tuple[str, int], tuple[Tensor, bool]]


class World:
    """The tensors of a call, in all roles, and a plan over them."""

    def __init__(
        self,
        options: Options,
        seed: int,
        device: str = "cpu",
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`dtypes` are those of single lists, instead of options' ones."""
        self.rng = np.random.default_rng(seed)
        self._dtypes = dtypes or {}
        self.device, self.values = device, options["values"]
        self.way, self.threads = options["way"], options["threads"]
        self.single = self.way in _ONE
        sizes = _SIZES[options["sizes"]]
        if self.single:
            sizes = [sizes[self.rng.integers(len(sizes))]]
        self.n = len(sizes)
        kinds = DTYPES[options["dtypes"]]
        first = int(self.rng.integers(len(kinds)))
        self.types = [kinds[(first + i) % len(kinds)] for i in range(self.n)]
        predictions = _WRITTEN[options.get("predictions", "none")]
        self.outs = [f"out{j}" for j in range(max(2, len(predictions)))]
        shapes = [shape_of(size, options["layout"]) for size in sizes]
        same = self.rng.integers(1, 18, self.n)
        self.lists: dict[str, GuardedList] = {}
        for name in ("params", "grads", "momentum", "second", "stashed", *self.outs):
            shift = self.rng.integers(1, 18, self.n) if options["layout"] == "shifted" else same
            types = [self._type(name, i) for i in range(self.n)]
            made = GuardedList(shapes, types, options["layout"], shift=shift, device=device)
            made.fill(self.rng, self.values, positive=name == "second")
            self.lists[name] = made
        self.groups = [0] * self.n
        self.n_groups = 1
        if self.way == "groups":
            self.groups = [int(self.rng.integers(3)) for _ in range(self.n - 1)] + [2]
            self.n_groups = 3
        self.missing = [False] * self.n
        self._plans: dict[bool, st.Plan] = {}

    def _type(self, name: str, i: int) -> torch.dtype:
        types = self.types[i]
        if name in self._dtypes:
            return self._dtypes[name]
        if name.startswith("out"):
            return types.outs[int(name[3:]) % len(types.outs)]
        of_state = name in ("momentum", "second")
        return types.state if of_state else types.grads if name == "grads" else types.weights

    def argument(self, name: str) -> Any:
        tensors = self.lists[name].tensors
        return tensors[0] if self.single else tensors

    def grads(self) -> Any:
        pairs = zip(self.lists["grads"].tensors, self.missing, strict=True)
        present = [None if missing else grad for grad, missing in pairs]
        return present[0] if self.single else present

    def plan(self, adam: bool) -> st.Plan:
        if adam not in self._plans:
            moments = {"exp_avgs": "momentum", "exp_avg_sqs": "second"}
            state = moments if adam else {"momentum_buffers": "momentum"}
            self._plans[adam] = st.Plan(
                self.argument("params"),
                grads=self.grads(),
                stashed=self.argument("stashed"),
                outs=[self.argument(name) for name in self.outs],
                groups=self.groups if self.way == "groups" else None,
                **{key: self.argument(name) for key, name in state.items()},
            )
        return self._plans[adam]

    def take_gradients(self, missing: str) -> None:
        """Draw other gradients, of which some are missing, for plans too."""
        self.missing = self.draw(missing)
        self.lists["grads"].fill(self.rng, self.values)
        for plan in self._plans.values():
            plan.refresh(self.grads())

    def flat(self, name: str, i: int) -> Tensor:
        return self.lists[name].flat[i].cpu()

    def state(self, i: int, adam: bool) -> list[Tensor]:
        return [self.flat(name, i) for name in (("momentum", "second") if adam else ("momentum",))]

    def draw(self, shares: str) -> list[bool]:
        """Draw a flag for each tensor."""
        if shares == "some":
            return [bool(x) for x in self.rng.integers(0, 2, self.n)]
        return [shares == "all"] * self.n

    def check(
        self, what: str, call: Callable[[], Any], later: Callable[[], Effects], written: list[str]
    ) -> Any:
        """Make a call, compare what it changes, and return its result.

        `later` predicts its effects; it reads stored values after the call where a prediction does.
        `written` are the lists whose version counters a function bumps.
        """
        before = {name: made.buffer.to("cpu", copy=True) for name, made in self.lists.items()}
        counted = {name: versions(made.tensors) for name, made in self.lists.items()}
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        result = call()
        torch.set_num_threads(threads)
        effects = later()
        for name, made in self.lists.items():
            expected = made.views(before[name])
            exact = [True] * self.n
            for i, values in enumerate(expected):
                if (name, i) in effects:
                    changed, exact[i] = effects[name, i]
                    assert changed.dtype == values.dtype, f"{what}: {name}[{i}]"
                    values.copy_(changed)
            if not torch.equal(made.buffer.cpu(), before[name]):
                for i, now in enumerate(made.flat):
                    compare = ref.assert_bits if exact[i] else ref.assert_same
                    compare(now, expected[i], f"{what}: {name}[{i}]")
                made.check_guards(f"{what}: {name}")
            bumped = [b > a for a, b in zip(counted[name], versions(made.tensors), strict=True)]
            bumps = self.way not in _PLANS and name in written
            of_step = name in ("params", "grads", "momentum", "second") and "step" in what
            expects = [bumps and not (of_step and missing) for missing in self.missing]
            assert bumped == expects, f"{what}: version counters of {name}"
        return result

    def check_new(self, what: str, result: Any, expected: Sequence[tuple[Tensor, bool]]) -> None:
        """Check an operator's new tensors: they lie in memory like the parameters."""
        assert isinstance(result, Tensor) == self.single, what
        made = [result] if self.single else list(result)
        for i, (got, (values, exact)) in enumerate(zip(made, expected, strict=True)):
            like = self.lists["params"].tensors[i]
            assert got.shape == like.shape and got.device == like.device, f"{what}[{i}]"
            assert got.stride() == like.stride() or not got.numel(), f"{what}[{i}]: strides"
            flat = got.as_strided((got.numel(),), (1,)).cpu()
            (ref.assert_bits if exact else ref.assert_same)(flat, values, f"{what}: result[{i}]")


# Numbers.


def _lr_of(kind: str, rng: np.random.Generator) -> float:
    numbers = {"zero": 0.0, "vanishing": 1e-60, "huge": 3e38, "of numpy": np.float32(0.3)}
    lr = numbers.get(kind, float(rng.choice([0.1, 0.05, 1.0, 0.7])))
    return float(np.float32(lr)) if kind == "float32 in memory" else lr


def numbers_of(options: Options, rng: np.random.Generator) -> Numbers:
    """Return a rule's hyperparameters, among them ordinary and extreme ones."""
    rule, decay = options["rule"], options["decay"]
    common: dict[str, Any] = {
        "lr": _lr_of(options["lr"], rng),
        "weight_decay": 0.0 if decay == "no" else float(rng.choice([0.01, 1e-4, 2.0])),
        "decoupled_weight_decay": decay == "decoupled",
        "maximize": options.get("maximize", False),
    }
    if rule in _ADAM_RULES:
        step = int(rng.choice([1, 2, 7, 100, 3000]))
        divides = options.get("predictions", options.get("law")) in (*_BY_SECOND, _NO_DELAY)
        beta1 = float(rng.choice([0.9, 0.5, 0.95] if divides else [0.9, 0.0, 0.5, 0.95]))
        common["eps"] = float(rng.choice([1e-8, 0.0, 1e-30, 1.0]))
        if rule == "NAdam":
            momentum_decay = float(rng.choice([4e-3, 0.0]))
            common["momentum_decay"] = momentum_decay
            common["mu_product"] = ref.nadam_product(beta1, momentum_decay, step)
        return Adam(betas=(beta1, float(rng.choice([0.999, 0.0, 0.95]))), step=step, **common)
    momentum = float(rng.choice([0.9, 0.5, 0.99]))
    momentum = {"SGD without momentum": 0.0, "undamped SGD": 1.0}.get(rule, momentum)
    return Sgd(
        momentum=momentum,
        dampening=float(rng.choice([0.1, 1.0])) if rule == "dampened SGD" else 0.0,
        nesterov="Nesterov" in rule,
        smoothed="smoothed" in rule,
        **common,
    )


class _Call:
    """The numbers of a call: of each group, and as arguments."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.adam = world, options["rule"] in _ADAM_RULES
        self.groups = [numbers_of(options, world.rng) for _ in range(world.n_groups)]
        self.own = [self.groups[group] for group in world.groups]  # of each tensor
        self.rates: list[Any] = [numbers.lr for numbers in self.groups]
        if options["lr"] in _IN_MEMORY:
            for k in range(0, world.n_groups, 2):
                dtype = _IN_MEMORY[options["lr"]]
                self.rates[k] = in_memory(self.rates[k], dtype, world.device)

    def numbers(self) -> list[Any]:
        """Return the numbers of each group as a plan takes them."""
        pairs = zip(self.groups, self.rates, strict=True)
        return [replace(numbers, lr=rate) for numbers, rate in pairs]

    def keywords(self) -> dict[str, Any]:
        """Return the numbers, the same for all groups, as arguments of a function."""
        return {**ref.keywords(self.groups[0]), "lr": self.rates[0]}

    def in_schema(self) -> dict[str, Any]:
        """Return the numbers as arguments of torch.ops."""
        given = self.keywords()
        rate = given["lr"]
        if not isinstance(rate, (int, float)):
            given |= {"lr": 0.0, "lr_tensor": rate.tensor if isinstance(rate, Rate) else rate}
        if "betas" in given:
            given["beta1"], given["beta2"] = given.pop("betas")
        return given

    def laws(self, horizon: Horizon, index: int) -> Any:
        """Return a horizon for every group, or in odd places a tuple of different ones."""
        if self.world.n_groups == 1 or index % 2 == 0:
            return horizon
        return horizon, 1.0, Linear(0.0)

    def terms(self, i: int, laws: Any) -> list[Term]:
        """Return the terms of a prediction for a tensor."""
        law = laws[self.world.groups[i]] if isinstance(laws, tuple) else laws
        law = law if hasattr(law, "sgd") else Linear(law)
        own = self.own[i]
        return law.adam(own) if isinstance(own, Adam) else law.sgd(own)


def _schema_of(laws: Sequence[Any]) -> tuple[list[str], list[float]]:
    """Return laws as torch.ops takes them: names, and all their numbers in a row."""
    names, numbers = [], []
    for law in laws:
        if isinstance(law, SecondOrder):
            names.append("second_order")
            numbers += [law.delay, law.lead]
        else:
            names.append("geometric" if isinstance(law, Geometric) else "linear")
            numbers.append(float(getattr(law, "steps", law)))
    return names, numbers


# Calls.


def check_step(world: World, options: Options) -> None:
    """Make a step of SGD or Adam with predictions."""
    asked = _WRITTEN[options["predictions"]]
    world.take_gradients(options["missing"])
    call = _Call(world, options)
    first = world.draw(options["first"])
    laws = [None if x is None else call.laws(x, j) for j, x in enumerate(asked)]
    gate, seed_of_rounding = GATES[options["gate"]], options["seed"]
    shape = [(), (1,), (1, 1)][int(world.rng.integers(3))]
    more: dict[str, Any] = {
        name: torch.full(shape, value, dtype=F32, device=world.device)
        for name, value in gate.items()
    }
    if options["zero_grad"]:
        more["zero_grad"] = True
    if seed_of_rounding is not None:
        more["rounding_seed"] = seed_of_rounding
    if not call.adam and options["first"] != "no":
        more["first_step"] = first if options["first"] == "some" else True
    expected: Effects = {}
    directions, position = [], 0
    skips = math.isnan(gate.get("found_inf", 0.0)) or gate.get("found_inf", 0.0) != 0
    factor = float(np.float32(gate.get("clip_factor", 1.0)))
    factor /= float(np.float32(gate.get("grad_scale", 1.0))) if not skips else 1.0
    has_state = options["rule"] != "SGD without momentum"
    for i, numbers in enumerate(call.own):
        w, g = world.flat("params", i), world.flat("grads", i)
        rounded = None if seed_of_rounding is None else (seed_of_rounding, position)
        position += w.numel()
        directions.append(ref.direction(numbers, w, g, factor))
        if options["zero_grad"] and not world.missing[i]:
            expected["grads", i] = torch.zeros_like(g), True
        if not skips and not world.missing[i]:
            state = world.state(i, call.adam) if has_state else []
            new = ref.step(numbers, w, g, state, first=first[i], factor=factor, rounded=rounded)
            for name, values in zip(("params", "momentum", "second"), new, strict=False):
                expected[name, i] = values, False

    def effects() -> Effects:
        for j, law in enumerate(laws):
            for i, numbers in enumerate(call.own):
                if law is None or skips:
                    continue
                w, state = world.flat("params", i), world.state(i, call.adam)
                terms = [] if world.missing[i] else call.terms(i, _after(law, numbers, options))
                dtype = world.lists[f"out{j}"].flat[i].dtype
                hat = ref.predict(numbers, terms, w, state, directions[i], dtype)
                expected[f"out{j}", i] = hat, not terms and dtype == w.dtype
        return expected

    state_names = (["momentum", "second"] if call.adam else ["momentum"]) if has_state else []
    written = ["params", *state_names, *world.outs[: len(asked)]]
    written += ["grads"] if options["zero_grad"] else []
    world.check(f"step {options}", lambda: _step(world, call, laws, more), effects, written)


def _after(law: Any, numbers: Numbers, options: Options) -> Any:
    """Return the law of a prediction by a first step, which sets v to d: v was 0 before."""
    gain = 1.0
    if isinstance(numbers, Sgd):
        gain = 1.0 - numbers.momentum if numbers.smoothed else 1.0 - numbers.dampening
    if isinstance(law, tuple):
        return tuple(_after(each, numbers, options) for each in law)
    if not isinstance(law, SecondOrder) or options["first"] != "all" or gain == 1.0:
        return law
    return Linear(law.delay + law.lead + law.delay * (law.delay + 1.0) / 2.0)


def _step(world: World, call: _Call, laws: list[Any], more: dict[str, Any]) -> None:
    name = "adam_step_" if call.adam else "sgd_step_"
    if world.way in _PLANS:
        method = getattr(world.plan(call.adam), name)
        if world.way == "groups":
            method(call.numbers(), predict=laws, **more)
        else:
            method(**call.keywords(), predict=laws, **more)
        return
    outs = [world.argument(f"out{j}") for j in range(len(laws))]
    lists = [world.argument("params"), world.grads(), world.argument("momentum")]
    lists += [world.argument("second")] if call.adam else []
    needs_buffers = call.adam or call.groups[0].has_momentum
    if not needs_buffers and world.rng.random() < 0.5:
        lists[2] = [] if world.way == "torch.ops" else None
    if world.way != "torch.ops":
        pairs = list(zip(laws, outs, strict=True))
        getattr(st, name)(*lists, **call.keywords(), predict=pairs, **more)
        return
    if isinstance(more.get("first_step"), bool):
        more["first_step"] = [True] * world.n
    names, numbers = _schema_of(laws)
    flat = [t for out in outs for t in out]
    getattr(torch.ops.spectrain, name)(
        *lists, **call.in_schema(), outs=flat, horizons=numbers, laws=names, **more
    )


def check_prediction(world: World, options: Options) -> None:
    """Predict weights in place, to an output, or with a stash."""
    call = _Call(world, options)
    law = call.laws(_LAWS[options["law"]], int(world.rng.integers(2)))
    name, new = options["call"], options["output"] == "another" and world.way not in _PLANS
    target = "params"
    if name == "predict":
        target = "out1" if options["output"] == "another" and not new else "out0"
    expected: Effects = {}
    made = []
    for i, numbers in enumerate(call.own):
        w, terms = world.flat("params", i).clone(), call.terms(i, law)
        dtype = w.dtype if new else world.lists[target].flat[i].dtype
        hat = ref.predict(numbers, terms, w, world.state(i, call.adam), None, dtype)
        made.append((hat, not any(call.terms(k, law) for k in range(world.n)) and dtype == w.dtype))
        if name == "stash_predict_":
            expected["stashed", i] = w, True
        if name != "predict" or not new:
            expected[target, i] = made[-1]
    written = ["params", "stashed"] if name == "stash_predict_" else [] if new else [target]
    if name != "predict":
        new, written = False, list(dict.fromkeys(["params", *written]))
    result = world.check(
        f"prediction {options}",
        lambda: _predict(world, call, options, law, target, new),
        lambda: expected,
        written,
    )
    if new:
        world.check_new(f"prediction {options}", result, made)


def _predict(world: World, call: _Call, options: Options, law: Any, target: str, new: bool) -> Any:
    name = options["call"]
    numbers = call.keywords() if options["numbers"] == "all" else {"lr": call.rates[0]}
    if world.way in _PLANS:
        method = getattr(world.plan(call.adam), name)
        more = {"out": world.outs.index(target)} if name == "predict" else {}
        if call.adam or world.way == "groups":
            return method(call.numbers(), steps=law, **more)
        return method(steps=law, **numbers, **more)
    if options["numbers"] == "all":
        names = ("lr", "momentum", "weight_decay", "nesterov")
        if call.adam:
            names = ("lr", "step", "betas", "eps", "weight_decay", "decoupled_weight_decay")
        numbers = {key: numbers[key] for key in names}
    lists = [world.argument("params"), world.argument("momentum")]
    if call.adam:
        name = "adam_predict"
        lists.append(world.argument("second"))
    elif name == "stash_predict_":
        lists.insert(1, world.argument("stashed"))
    if world.way == "torch.ops":
        given = call.in_schema()
        if "betas" in numbers:
            numbers |= {"beta1": 0.0, "beta2": 0.0}
        given = {key: given[key] for key in (*numbers, "lr_tensor") if key in given}
        names, horizon = _schema_of([law])
        packet = getattr(torch.ops.spectrain, name)
        more = {"law": names[0], "steps": horizon, **given}
        return (
            packet.out(*lists, outs=world.argument(target), **more)
            if (not new and options["call"] == "predict")
            else packet(*lists, **more)
        )
    more = {} if new or options["call"] != "predict" else {"out": world.argument(target)}
    result = getattr(st, name)(*lists, steps=law, **numbers, **more)
    assert "out" not in more or result is more["out"]
    return result


def check_copy(world: World, options: Options) -> None:
    """Copy, exchange, extrapolate or compare versions of the weights."""
    name, steps = options["call"], options["steps"]
    new = options["output"] == "another" and world.way not in _PLANS
    out = "out1" if options["output"] == "another" and not new else "out0"
    expected: Effects = {}
    made = []
    for i in range(world.n):
        w, kept = world.flat("params", i).clone(), world.flat("stashed", i).clone()
        if name in ("stash", "swap_"):
            expected["stashed", i] = w, True
        if name in ("restore_", "swap_"):
            expected["params", i] = kept, True
        if name == "write_out":
            dtype = world.lists[out].flat[i].dtype
            expected[out, i] = w.to(dtype), dtype == w.dtype
        if name == "extrapolate":
            dtype = world.lists[out].flat[i].dtype
            expected[out, i] = (
                ref.extrapolate(w, kept, steps, dtype),
                not steps and dtype == w.dtype,
            )
        made.append(expected.get(("stashed" if name == "stash" else out, i), (w, True)))
    new = new and name in ("stash", "extrapolate")
    if new:
        expected = {}
    written = list(dict.fromkeys(target for target, _ in expected))
    what = f"copy {options}"
    result = world.check(
        what, lambda: _copy(world, name, steps, out, new), lambda: expected, written
    )
    if new:
        world.check_new(what, result, made)
    if name == "distance":
        w = [world.flat("params", i) for i in range(world.n)]
        lists = [[world.flat(kept, i) for i in range(world.n)] for kept in ("stashed", "params")]
        norms = torch.from_numpy(np.stack([ref.distance(w, other) for other in lists]))
        ref.assert_same(result.cpu(), norms, what)


def _copy(world: World, name: str, steps: float, out: str, new: bool) -> Any:
    arguments: dict[str, Any] = {"steps": steps} if name == "extrapolate" else {}
    if world.way in _PLANS:
        if name in ("extrapolate", "write_out"):
            arguments["out"] = world.outs.index(out)
        return getattr(world.plan(bool(world.rng.integers(2))), name)(**arguments)
    w, kept = world.argument("params"), world.argument("stashed")
    if name == "distance":
        if world.way == "torch.ops":
            return torch.ops.spectrain.distance(w, [*kept, *w], count=2)
        each, total = st.distance(w, [kept, w])
        return torch.cat([each, total[:, None]], dim=1)
    target = {} if new else {"out": kept if name == "stash" else world.argument(out)}
    lists = [w] if name == "stash" else [w, kept]
    if name in ("restore_", "swap_"):
        target = {}
    if world.way == "torch.ops":
        packet = getattr(torch.ops.spectrain, name)
        if target:
            return packet.out(*lists, outs=target["out"], **arguments)
        return packet(*lists, **arguments)
    result = getattr(st, name)(*lists, **arguments, **target)
    assert not target or result is target["out"]
    return result


PRODUCTS: dict[str, tuple[Callable[[World, Options], None], Factors, Excluded]] = {
    "step": (check_step, _STEPS, _EXCLUDED_STEPS),
    "prediction": (check_prediction, _PREDICTIONS, _EXCLUDED_PREDICTIONS),
    "copy": (check_copy, _COPIES, _EXCLUDED_COPIES),
}
