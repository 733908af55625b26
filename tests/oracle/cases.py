"""Settings in which pipelines are compared with the oracle, and the pairs that must be drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from helpers.covering import Axes, Row
from helpers.foreign_optimizers import FOREIGN, Lion
from helpers.random_settings import (
    CORRECTING,
    FLUSHING,
    HYBRIDS,
    MOMENTUM,
    OURS,
    OWN_WINDOWS,
    PREVIOUS,
    SECOND_ORDER,
    SGD_ONLY,
    definition_of,
)
from oracle.methods import METHODS, Definition, window_of
from oracle.sgd import AveragingSGD
from torch import nn

import spectrain_ext as st

WIDTH = 4
AFTER = 4  # minibatches of a first phase


# Methods by what they read, predict and keep

FAMILIES = {
    "flushes": ("sync", "gpipe", "1f1b", "interleaved"),
    "halves": ("zb-h1", "zb-h1-async"),
    "stale": ("vanilla", "pipemare-t1"),
    "stashes": ("pipedream", "pipedream-vertical-sync", "pipedream-2bw", "wpipe"),
    "predicts": ("spectrain-local", "pipeoptim", "lwp-v", "msnag"),
    "predicts twice": ("spectrain", "spectrain-smoothed", "xpipe"),
    "predicts and stashes": ("spectrain-stash", "msnag-stash", "xgrad"),
    "second order": ("second-order", "auto", "interleaved-async"),
    "by difference": ("lwp-w", "spectrain difference", "error-feedback"),
    "looks back": ("pipemare-t2", "pipemare"),
    "corrects": ("sc", "sc-lwp", "braking", "dc-asgd", "gap-aware"),
    "phases": tuple(f"{first}+{then}@{AFTER}" for first, then in HYBRIDS),
}
FAMILY_OF = {method: family for family, methods in FAMILIES.items() for method in methods}
_PARTS = {method: {*method.partition("@")[0].split("+")} for method in FAMILY_OF}


# Optimizers: the package's, and the oracle's with the same numbers


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    first = {"params": params[:1], "lr": 0.01}
    return [first, {"params": params[1:], "weight_decay": 0.1}] if params[1:] else [first]


def clips_itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def clip(*_: object) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 0.05)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def clamps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def change(bound: float, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.clamp_(-bound, bound)  # no counter tells

    optimizer.register_step_pre_hook(partial(change, 0.4))
    optimizer.register_step_post_hook(partial(change, 0.3))
    return optimizer


def sgd(**options: Any) -> tuple[Any, Any]:
    averaging = options.keys() & {"smoothed", "decoupled_weight_decay"}
    kinds = st.optim.SGD, AveragingSGD if averaging else torch.optim.SGD
    return of(kinds, {"lr": 0.03, "momentum": 0.9, **options})


def of(kinds: tuple[Any, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    mine, theirs = kinds
    return (lambda p: mine(p, **options)), (lambda p: theirs(p, **options))


_OF_SGD = {
    "momentum": sgd(),
    "average": sgd(lr=0.3, smoothed=True),
    "decoupled": sgd(weight_decay=0.1, decoupled_weight_decay=True),
    "dampening": sgd(dampening=0.3),
    "maximize": sgd(lr=0.003, maximize=True),
    "groups": tuple(lambda p, make=make: make(groups_of(p)) for make in sgd()),
    "hooked": tuple(lambda p, make=make: clips_itself(make(p)) for make in sgd()),
    "clamped": tuple(lambda p, make=make: clamps(make(p)) for make in sgd()),
}
_OTHERS = {
    "nesterov": sgd(nesterov=True, weight_decay=0.02),
    "no momentum": sgd(momentum=0.0),
    "Adam": of((st.optim.Adam, torch.optim.Adam), {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": of((st.optim.AdamW, torch.optim.AdamW), {"lr": 0.01, "betas": (0.8, 0.9)}),
    "NAdam": of((st.optim.NAdam, torch.optim.NAdam), {"lr": 0.01}),
    "Lion": of((st.optim.Lion, Lion), {"lr": 0.003, "weight_decay": 0.1}),
    "no mean": of((st.optim.Adam, torch.optim.Adam), {"lr": 0.003, "betas": (0.0, 0.9)}),
}
TORCHS = {"foreign SGD", "foreign fused"}  # which corrections of gradients take too
_FOREIGN = {f"foreign {name}": (make, make) for name, make in FOREIGN.items() if name != "AdamW"}
OPTIMIZERS = {**_OF_SGD, **_OTHERS, **_FOREIGN}
KIND_OF = {
    **dict.fromkeys(_OF_SGD, "SGD"),
    **dict.fromkeys(_OTHERS, "Adam"),
    **{"nesterov": "SGD", "no momentum": "no momentum"},
    **dict.fromkeys(_FOREIGN, "foreign"),
}
_DEFINED_FOR = {
    **{"nesterov": "nesterov", "Adam": "adam", "AdamW": "adam", "NAdam": "nadam"},
    "no mean": "adam",
    "Lion": "lion",
}
WITHOUT_MOMENTUM = ("no momentum", "no mean", *_FOREIGN)


# Learning rates, models, minibatches

RATES = {
    "constant": None,
    "by hand": None,  # halved between runs
    "decaying": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "in steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "up and down": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 60, cycle_momentum=False),
}
CLIPPING = {
    "none": {},
    "usual": {"clip_norm": 0.03},
    "stage": {"clip_norm": 0.03, "clip_scope": "stage"},
    "global": {"clip_norm": 0.05, "clip_scope": "global"},
}


def plain(n: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)]


def tied(*places: int) -> Any:
    """Return stages that share the weight of the first of these places; all without places."""

    def made(n: int) -> list[nn.Module]:
        stages = plain(n)
        first, *others = [k % n for k in places] or range(n)
        for k in others:
            stages[k][0].weight = stages[first][0].weight
        return stages

    return made


def uneven(n: int) -> list[nn.Module]:
    widths = [WIDTH, *(2 + 5 * k % 7 for k in range(1, n)), WIDTH]
    stages = []
    for k, (before, after) in enumerate(itertools.pairwise(widths)):
        more = [nn.LayerNorm(after), nn.Linear(after, after), nn.GELU()] * (k % 2)
        stages.append(nn.Sequential(nn.Linear(before, after, bias=k % 3 < 2), nn.Tanh(), *more))
    return stages


def normed(n: int) -> list[nn.Module]:
    return [nn.Sequential(nn.BatchNorm1d(WIDTH), *stage) for stage in plain(n)]


def idle(n: int) -> list[nn.Module]:
    """Return stages of which one has nothing to train."""
    stages = plain(n)
    stages[n // 2] = nn.Tanh()
    return stages


class Aside(nn.Linear):
    """Does not use its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def frozen(n: int) -> list[nn.Module]:
    """Return stages with unused parameters, and with some that are not trained."""
    stages: list[nn.Module] = [nn.Sequential(*stage, Aside(2, 2)) for stage in plain(n)]
    stages[0][0].bias.requires_grad_(False)
    if n > 1:
        stages[n // 2].requires_grad_(False)
    return stages


def words(n: int) -> list[nn.Module]:
    """Return a classifier of words."""
    stages = plain(n)
    stages[0] = nn.Sequential(nn.Embedding(WIDTH, WIDTH), *stages[0])
    return stages


MODELS = {
    "plain": plain,
    "uneven": uneven,
    "words": words,
    "normed": normed,
    "idle": idle,
    "frozen": frozen,
    "tied ends": tied(0, -1),
    "tied throughout": tied(),
    "tied late": tied(1, -1),
}
KEEPING = {"all": {}, "recompute": {"recompute": True}, "offload": {"offload": "activations"}}
SIZES = ("equal", "small last", "single")
RUNS = ("long", "short", "left")


class Case(NamedTuple):
    """One setting; ``microbatches`` 0 means the number of stages."""

    method: str = "vanilla"
    stages: int = 2
    microbatches: int = 0
    window: str = "usual"
    optimizer: str = "momentum"
    rates: str = "constant"
    clipping: str = "none"
    keeping: str = "all"
    model: str = "plain"
    sizes: str = "equal"
    runs: str = "long"

    @property
    def m(self) -> int:
        return self.microbatches or self.stages

    @property
    def asked(self) -> str | int | list[int] | None:
        """Return the pipeline's argument ``window``."""
        if self.window == "uneven":  # neither N - k nor constant; it must not increase
            return [self.stages + 2 - (k + 1) // 2 for k in range(self.stages)]
        return {"usual": None, "2": 2}.get(self.window, self.window)

    @property
    def definition(self) -> Definition:
        return definition_of(self.method, self.optimizer not in WITHOUT_MOMENTUM)

    @property
    def windows(self) -> list[int]:
        n = self.stages
        return [window_of(self.definition, self.asked, k, n, self.m) for k in range(n)]

    @property
    def options(self) -> dict[str, Any]:
        """Return the pipeline's optional arguments."""
        window = {} if self.asked is None else {"window": self.asked}
        more = {**window, **CLIPPING[self.clipping], **KEEPING[self.keeping]}
        return {"microbatches": self.m, "scheduler": RATES[self.rates], **more}

    def batches(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size, last = self.m + 1, max(1, self.m - 1)
        if self.model == "normed":  # of two samples only signs would remain
            size, last = 4 * size, 4 * self.m
        sizes = [size] * count
        if self.sizes == "single":
            sizes = [size if i % 3 == 2 else 1 for i in range(count)]
        elif self.sizes == "small last" and sizes:
            sizes[-1] = last
        if self.model == "words":
            return [(torch.randint(WIDTH, (s,)), torch.randint(WIDTH, (s,))) for s in sizes]
        return [(torch.randn(s, WIDTH), torch.randn(s, WIDTH)) for s in sizes]

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_")


def exists(row: Row) -> bool:
    """Return whether a delay of one update is enough for the windows."""
    case = Case(**row)
    return case.method not in PREVIOUS or (
        case.m >= case.stages and max(case.windows) <= case.m + 1
    )


def _with(names: Iterable[str]) -> list[str]:
    """Return the methods of which one phase is one of these."""
    return [method for method, parts in _PARTS.items() if parts & {*names}]


# Pairs that the package refuses, each with its message.
_ASYNCHRONOUS = [m for m in FAMILY_OF if not _PARTS[m] <= {*FLUSHING, "xgrad"}]
_NOT_FOR = {
    optimizer: [m for m in METHODS if _DEFINED_FOR[optimizer] not in METHODS[m].families]
    for optimizer in _DEFINED_FOR
}
REFUSED = [
    (("method", ["xgrad"]), ("stages", range(2, 9)), "is defined for at most 1 stage, got"),
    (
        ("method", [method for method in FAMILY_OF if _PARTS[method] <= OWN_WINDOWS]),
        ("window", ["classic", "wide", "2", "uneven"]),
        "there is no window to choose",
    ),
    (("method", _ASYNCHRONOUS), ("clipping", ["global"]), "update at different times"),
    (
        ("method", _with((OURS | SGD_ONLY) - {*CORRECTING})),
        ("optimizer", _FOREIGN),
        "(predicts with the momentum|corrects the steps) of an optimizer of spectrain_ext.optim|"
        "is defined for sgd|has no smoothed momentum",
    ),
    (("method", CORRECTING), ("optimizer", {*_FOREIGN} - TORCHS), "is defined for sgd"),
    (("method", ["braking"]), ("optimizer", ["foreign fused"]), "is defined for sgd$"),
    (
        ("method", [*_with(MOMENTUM | {"sc-lwp"}), "spectrain-smoothed"]),
        ("optimizer", ["no momentum"]),
        "parameter group 0(:| has) (momentum|no (smoothed )?momentum)",
    ),
    (("method", _with({"second-order"})), ("optimizer", ["no mean"]), "0: betas.* momentum > 0"),
    (
        ("method", ["spectrain-smoothed"]),
        ("optimizer", {*OPTIMIZERS} - {"average", *_FOREIGN}),
        "has no smoothed momentum; pass smoothed=True|is defined for sgd",
    ),
    (
        ("method", _NOT_FOR["nesterov"]),
        ("optimizer", ["nesterov"]),
        "nesterov: is spike compensation for a delay of 1",
    ),
    *(
        (("method", methods), ("optimizer", [optimizer]), "and method '.*' is defined for sgd")
        for optimizer, methods in _NOT_FOR.items()
        if optimizer != "nesterov"
    ),
]
_ROOMLESS = [m for m in FAMILY_OF if not definition_of(m, True).roomy]
# Pairs without a meaning, or without a definition to compare with.
MEANINGLESS = [
    (("stages", [1]), ("model", ["idle", "tied ends", "tied throughout", "tied late"])),
    (("stages", [2]), ("model", ["tied late"])),
    (("clipping", ["global"]), ("window", ["classic", "wide", "2", "uneven"])),
    (("model", ["normed"]), ("sizes", ["single"])),
    (("method", _ROOMLESS), ("window", ["classic"])),  # it is the usual one
    # The package's law takes the first change of a momentum as zero.
    (("method", _with(SECOND_ORDER | {"second-order"})), ("optimizer", ["dampening"])),
    (("method", ["sc"]), ("optimizer", ["no momentum"])),  # the oracle's formula is for one
    (("method", ["sc", "sc-lwp"]), ("optimizer", ["hooked", "clamped"])),  # whose step it is
]
_FEATURES = ("optimizer", "rates", "clipping", "keeping", "model", "sizes", "runs")
AXES = Axes(
    {
        "method": FAMILY_OF,
        "stages": (1, 2, 3, 5),
        "microbatches": (1, 2, 3, 0),
        "window": ("usual", "classic", "wide", "2", "uneven"),
        "optimizer": OPTIMIZERS,
        "rates": RATES,
        "clipping": CLIPPING,
        "keeping": KEEPING,
        "model": MODELS,
        "sizes": SIZES,
        "runs": RUNS,
    },
    [*(dict(pair) for *pair, _ in REFUSED), *map(dict, MEANINGLESS)],
    {"family": ("method", FAMILY_OF), "kind": ("optimizer", KIND_OF)},
    [
        *(("method", other) for other in ("stages", "microbatches", "window", "kind")),
        *(("family", other) for other in _FEATURES),
        *((a, b) for i, a in enumerate(_FEATURES) for b in _FEATURES[i + 1 :]),
        *((a, b) for a in ("stages", "microbatches", "window") for b in _FEATURES),
        *(("stages", "microbatches"), ("stages", "window"), ("microbatches", "window")),
    ],
    exists,
)
