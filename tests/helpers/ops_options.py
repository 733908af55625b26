"""Says in which ways the operators can be called: the factors of a product, and their values.

The factors of steps, predictions and copies are named like the operators' arguments or say what
differs. EXCLUDED_* has the combinations that do not exist, or that have tests of their own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import ops_reference as ref
from helpers.covering import Row as Options
from helpers.ops_reference import Numbers

from spectrain_ext import laws

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


#: Of the numbers, see `ops_tensors.values`.
KINDS = ("normal", "wide", "special", "bits")
#: How the tensors of a list lie in memory.
LAYOUTS = (
    "apart",  # each at a multiple of 64 bytes
    "offset",  # each behind such a multiple by as many elements as in all other lists
    "shifted",  # each by another number of elements in each list, so that vectors never align
    "channels last",
    "permuted",
    "adjacent",  # one after the other without a gap: neighbours can merge
    "nearly adjacent",  # with gaps of a few elements
    "backwards",  # adjacent, the first tensor at the end
)


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
    "float32 with bfloat16 state": [Types(F32, F32, BF16, (F32,))],
    "bfloat16 beside float32 with bfloat16 state": [Types(F32, BF16, BF16, (BF16, F32))],
    "all": [
        Types(F32, F32, F32, (F32,)),
        Types(F64, F64, F64, (F64,)),
        Types(F16, F16, F32, (F16,)),
        Types(BF16, BF16, BF16, (BF16,)),
        Types(F32, BF16, F32, (F32, BF16)),
        Types(F32, F16, F32, (F16,)),
        Types(F32, F32, BF16, (F32, BF16)),
    ],
}
_NARROW = [name for name, types in DTYPES.items() if any({*t.outs} != {t.weights} for t in types)]
SIZES = {
    "none": [],
    "one element": [1],
    "nine": [9],
    "vectors": [0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 255, 511],
    "chunks": [1023, 1025, 4095, 4101, 0, 8200],
    "many": [i % 9 for i in range(45)],
    "parallel": [60_003, 5],
    "streamed": [600_011],  # outputs bypass the cache
}
ONE = ["one tensor", "plan of one tensor"]
PLANS = ["plan", "plan of one tensor", "groups"]
_NO_PLANS = ["function", "one tensor"]
#: Factors of every product: how an operator is called, and on which tensors.
_COMMON = {
    "way": ("function", "one tensor", "plan", "plan of one tensor", "groups"),
    "dtypes": tuple(DTYPES),
    "layout": LAYOUTS,
    "sizes": tuple(size for size in SIZES if size not in ("nine", "streamed")),
    "values": KINDS,
    "threads": (1, 2, 5),
}
_EXCLUDED = [
    {"way": ONE, "sizes": ["none", "many"]},
    {"way": ONE, "layout": ["adjacent", "nearly adjacent", "backwards"]},
    {"way": ["groups"], "sizes": ["none"]},  # the last group has a tensor
]

IN_MEMORY = {"float32 in memory": F32, "float64 in memory": F64}
_LR = ("ordinary", "zero", "vanishing", "huge", "of numpy", *IN_MEMORY)


class _Own(laws.Law):
    """A law of a user."""

    def sgd(self, numbers: laws.SgdNumbers) -> list[laws.Term]:
        return [laws.Term(0.75, numbers.lr * 0.5)]

    def adam(self, numbers: laws.AdamNumbers) -> list[laws.Term]:
        return [laws.Term(0.5, 0.25, 0.0, 2.0), laws.Term(1.0, 0.125)]

    def lion(self, numbers: laws.LionNumbers) -> list[laws.Term]:
        return [laws.Term(0.75, numbers.lr * 0.5)]


_SECOND = laws.SecondOrder(2.0, 1.0)
#: Predictions that a step writes.
WRITTEN: dict[str, list[laws.Horizon | None]] = {
    "none": [],
    "linear": [2.0],
    "some outputs": [None, 2.5, None],
    "geometric": [laws.Geometric(3), 0, laws.Geometric(0)],
    "own law": [_Own(), laws.Linear(0.0)],
    "second order": [1.0, _SECOND],
    "two passes": [float(j % 5) for j in range(10)],
    "second order in two passes": [1.0] * 9 + [_SECOND],
    "many terms": [laws.Geometric(40), laws.Geometric(1), laws.Geometric(40)],
}
#: Scalars of a step, in memory of the device.
GATES: dict[str, dict[str, float]] = {
    "none": {},
    "scale": {"grad_scale": 3.7},
    "clip": {"clip_factor": 0.3},
    "scale and clip": {"grad_scale": 32.0, "clip_factor": 4.0, "found_inf": 0.0},
    "skip": {"found_inf": 1.0, "grad_scale": 0.0},
    "skip by NaN": {"found_inf": math.nan, "clip_factor": 2.0},
}
_SGD_RULES = ("SGD", "undamped SGD", "dampened SGD", "Nesterov", "smoothed", "smoothed Nesterov")
ADAM_RULES = ("Adam", "NAdam")
_SEEDS = (5, -1, 2**63 + 4)
_ROUNDED = ("bfloat16", "bfloat16 with float32 state")
STEPS = {
    "rule": ("SGD without momentum", *_SGD_RULES, *ADAM_RULES, "Lion"),
    **_COMMON,
    "lr": _LR,
    "predictions": tuple(WRITTEN),
    "decay": ("no", "L2", "decoupled"),
    "maximize": (False, True),
    "first": ("no", "all", "some"),
    "missing": ("no", "all", "some"),
    "gate": tuple(GATES),
    "zero_grad": (False, True),
    "seed": (None, *_SEEDS),
}
_BY_SECOND = ["second order", "second order in two passes"]
_NOT_ADAM = [*_SGD_RULES, "Lion"]
_NONLINEAR = [
    {"lr": list(IN_MEMORY), "predictions": [x], "rule": [rule]}
    for x in ("geometric", "many terms")
    for rule in _NOT_ADAM
]
EXCLUDED_STEPS = [
    *_EXCLUDED,
    {"rule": ["SGD without momentum"], "predictions": [x for x in WRITTEN if x != "none"]},
    {"rule": ["SGD without momentum", *ADAM_RULES, "Lion"], "first": ["all", "some"]},
    {"rule": ["NAdam"], "lr": list(IN_MEMORY)},
    {"rule": ["Lion"], "decay": ["L2"]},
    {"way": _NO_PLANS, "predictions": ["some outputs"]},
    {"way": ["plan of one tensor"], "missing": ["all", "some"]},  # None: they are not known yet
    {"seed": _SEEDS, "dtypes": [x for x in DTYPES if x not in _ROUNDED]},
    # Refused for some rules, see test_laws.py and test_numbers.py.
    {"first": ["some"], "predictions": _BY_SECOND},
    # Optimizers alone have first steps of some tensors.
    {"first": ["some"], "way": ["function", "one tensor", "plan", "plan of one tensor"]},
    {"first": ["some"], "sizes": ["none"]},
    *_NONLINEAR,
]

_NO_DELAY = "second order without delay"
LAWS: dict[str, laws.Horizon] = {
    "no step": 0,
    "linear": 2,
    "fraction": np.float64(2.5),
    "geometric": laws.Geometric(3),
    "geometric of no step": laws.Geometric(0),
    _NO_DELAY: laws.SecondOrder(0.0, 2.0),
    "own": _Own(),
}
_BY_MOMENTUM = ["geometric", "geometric of no step", _NO_DELAY, "own"]
PREDICTIONS = {
    "call": ("predict_", "predict", "stash_predict_"),
    "rule": ("SGD", "Nesterov", "smoothed", *ADAM_RULES, "Lion"),
    **_COMMON,
    "lr": _LR,
    "law": tuple(LAWS),
    "decay": ("no", "L2", "decoupled"),
    "numbers": ("all", "lr only"),
    "output": ("given", "another"),  # of several in a plan; a new one of a function
}
EXCLUDED_PREDICTIONS = [
    *_EXCLUDED,
    {"way": _NO_PLANS, "rule": ["smoothed", "NAdam"]},
    {"way": _NO_PLANS, "rule": ["SGD", "Nesterov"], "decay": ["decoupled"]},
    {"way": _NO_PLANS, "rule": ["Adam", "Lion"], "call": ["predict_", "stash_predict_"]},
    {"rule": ["NAdam"], "lr": list(IN_MEMORY)},
    {"rule": ["Lion"], "decay": ["L2"]},
    {"numbers": ["lr only"], "law": _BY_MOMENTUM},
    {"numbers": ["lr only"], "rule": [*ADAM_RULES, "Lion", "Nesterov", "smoothed"]},
    {"numbers": ["lr only"], "decay": ["L2", "decoupled"]},
    {
        "lr": list(IN_MEMORY),
        "law": ["geometric"],
        "decay": ["L2", "decoupled"],
        "rule": ["SGD", "smoothed", "Lion"],
    },
    {"lr": list(IN_MEMORY), "law": ["geometric"], "rule": ["Nesterov"]},  # see test_numbers.py
]

COPIES = {
    "call": ("stash", "restore_", "swap_", "write_out", "extrapolate", "distance"),
    **_COMMON,
    "output": ("given", "another"),
    "steps": (0, 1, 2.5),
}
EXCLUDED_COPIES = [
    *_EXCLUDED,
    {"call": ["write_out"], "way": _NO_PLANS},
    {"call": ["distance"], "way": PLANS},
    {"call": ["extrapolate"], "dtypes": _NARROW},
]


# Numbers.


def _lr_of(kind: str, rng: np.random.Generator) -> float:
    numbers = {"zero": 0.0, "vanishing": 1e-60, "huge": 3e38, "of numpy": np.float32(0.3)}
    lr = numbers.get(kind, float(rng.choice([0.1, 0.05, 1.0, 0.7])))
    return float(np.float32(lr)) if kind == "float32 in memory" else lr


def numbers_of(options: Options, rng: np.random.Generator) -> Numbers:
    """Return a rule's hyperparameters, among them ordinary and extreme ones."""
    rule, decay = options["rule"], options["decay"]
    if rule == "Lion":
        return laws.LionNumbers(
            _lr_of(options["lr"], rng),
            (float(rng.choice([0.9, 0.0])), float(rng.choice([0.99, 0.9]))),
            0.0 if decay == "no" else float(rng.choice([0.1, 2.0])),
            options.get("maximize", False),
        )
    common: dict[str, Any] = {
        "lr": _lr_of(options["lr"], rng),
        "weight_decay": 0.0 if decay == "no" else float(rng.choice([0.01, 1e-4, 2.0])),
        "decoupled_weight_decay": decay == "decoupled",
        "maximize": options.get("maximize", False),
    }
    if rule in ADAM_RULES:
        step = int(rng.choice([1, 2, 7, 100, 3000]))
        divides = options.get("predictions", options.get("law")) in (*_BY_SECOND, _NO_DELAY)
        beta1 = float(rng.choice([0.9, 0.5, 0.95] if divides else [0.9, 0.0, 0.5, 0.95]))
        common["eps"] = float(rng.choice([1e-8, 0.0, 1e-30, 1.0]))
        if rule == "NAdam":
            momentum_decay = float(rng.choice([4e-3, 0.0]))
            common["momentum_decay"] = momentum_decay
            common["mu_product"] = ref.nadam_product(beta1, momentum_decay, step)
        return laws.AdamNumbers(
            betas=(beta1, float(rng.choice([0.999, 0.0, 0.95]))), step=step, **common
        )
    momentum = float(rng.choice([0.9, 0.5, 0.99]))
    momentum = {"SGD without momentum": 0.0, "undamped SGD": 1.0}.get(rule, momentum)
    return laws.SgdNumbers(
        momentum=momentum,
        dampening=float(rng.choice([0.1, 1.0])) if rule == "dampened SGD" else 0.0,
        nesterov="Nesterov" in rule,
        smoothed="smoothed" in rule,
        **common,
    )
