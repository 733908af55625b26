"""Completes and validates the settings of a comparison; defaults per data set and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from spectrain_ext.cli.options import is_imported, method_of
from spectrain_ext.method import (
    Method,
    Window,
    find_method,
    methods,
    microbatches_of,
    numbers_of,
    phases_of,
)
from spectrain_ext.schedule import Replicas, takes_window

from .options import OptionError
from .workload import OFFERED, parameters_of, start_rate
from .world import World

Optimizer = Literal["sgd", "adam", "adamw", "nadam", "muon", "soap", "basis-rotation"]


@dataclass(frozen=True)
class Preset:
    """Defaults of the options of these names; None means all samples, or the model's own depth."""

    epochs: int
    batch_size: int
    width: int
    depth: int | None
    lr: float
    optimizer: Optimizer = "sgd"
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    warmup: int = 0
    context: int = 0
    train_samples: int | None = None
    test_samples: int | None = None
    seeds: int = 5


_MLP = Preset(epochs=6, batch_size=16, width=64, depth=None, lr=0.05)
_DECAYING = replace(_MLP, lr_schedule="cosine", seeds=3)
_VISION = replace(_DECAYING, epochs=60, batch_size=128, weight_decay=5e-4, warmup=400)
_TEXT = replace(
    _DECAYING, epochs=10, batch_size=32, width=256, depth=6, lr=0.5, warmup=100, context=128
)
_PRESETS = {
    ("digits", "residual-mlp"): _MLP,
    ("cifar10", "residual-mlp"): replace(_VISION, epochs=20, width=256, lr=0.02, weight_decay=0.0),
    ("cifar10", "vgg16"): _VISION,
    ("cifar10", "resnet"): _VISION,
    # at its original width; CIFAR-10 images are resized to 75 pixels
    ("cifar10", "inception-v4"): replace(_VISION, width=32),
    ("cifar10", "snn"): replace(_VISION, width=1024, lr=0.005, weight_decay=0.0),
    ("text", "gpt"): replace(_TEXT, lr=3e-4, optimizer="adamw", weight_decay=0.01),
    ("text", "lstm"): _TEXT,
    # rates are relative to that of hidden matrices, see ``make_any_optimizer``
    ("text", "speedrun"): replace(_TEXT, depth=None, lr=0.025, optimizer="muon", weight_decay=0.05),
}

# Sizes with which all default methods together take minutes on two cores.
_QUICK: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 1, "seeds": 1},
    "cifar10": {
        **{"epochs": 2, "batch_size": 32, "width": 8, "lr": 0.02, "warmup": 30, "seeds": 1},
        **{"train_samples": 3072, "test_samples": 1000},
    },
    "text": {
        **{"epochs": 1, "batch_size": 16, "width": 64, "context": 64, "warmup": 30, "seeds": 1},
        **{"train_samples": 4096, "test_samples": 512},
    },
}
_QUICK_MODEL: dict[tuple[str, str], dict[str, Any]] = {
    ("cifar10", "residual-mlp"): {"width": 128},
    ("cifar10", "snn"): {"width": 128, "lr": 0.005},
    # SGD is still at chance accuracy after this time
    ("cifar10", "inception-v4"): dict(width=4, optimizer="adam", lr=0.004, weight_decay=0.0),
}

DATA_SETS = tuple(dict.fromkeys(data for data, _ in _PRESETS))
MODELS = tuple(dict.fromkeys(model for _, model in _PRESETS))
DEFAULT_MODEL = {"digits": "residual-mlp", "cifar10": "resnet", "text": "gpt"}


def models_for(data: str) -> tuple[str, ...]:
    """Return the models that can be trained on a data set."""
    return tuple(model for known, model in _PRESETS if known == data)


def preset(data: str, model: str, *, quick: bool) -> Preset:
    """Return the defaults for a data set and one of its models."""
    changes = {**_QUICK[data], **_QUICK_MODEL.get((data, model), {})} if quick else {}
    return replace(_PRESETS[data, model], **changes)


#: The default methods: synchronous training, plain and with the most overlap, one asynchronous
#: method of each kind, and the package's default.
DEFAULT_METHODS = ("sync", "1f1b", "vanilla", "pipedream", "spectrain", "spectrain-stash", "auto")
ALL = "all"
AUTO = "auto"  # the method that reports its choice


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings shared by all methods and seeds of a comparison.

    Settings that a workload of ``module:function`` decides itself are empty or 0.
    """

    workload: str | None = None  # module:function
    given: tuple[tuple[str, Any], ...] = ()  # what it is called with as well
    data: str = "digits"
    data_dir: Path | None = None
    model: str
    methods: tuple[str, ...] = DEFAULT_METHODS  # names or module:NAME
    seeds: tuple[int, ...]
    stages: int = 8
    devices: tuple[str, ...]  # one per stage
    epochs: int
    batch_size: int
    microbatches: int | Literal["auto"] = "auto"  # auto: each method's usual number
    window: Window = None
    codec: str | None = None  # name of the edge codec
    rank: int | None = None  # of the subspace on the edges of the model speedrun
    clip_norm: float | None = None
    recompute: bool = False
    width: int
    depth: int | None  # None: the model's own
    context: int
    train_samples: int | None = None  # None: all
    test_samples: int | None = None
    augment: bool = False
    optimizer: str
    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float
    nesterov: bool = False
    lr_schedule: str
    warmup: int
    threads: int = 1
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = None
    replicas: tuple[int, ...] | None = None  # per stage; None: one each
    updates: int | None = None  # None: as many as the epochs have

    @property
    def keeps_checkpoints(self) -> bool:
        """Return whether an interrupted run can be resumed."""
        return self.checkpoint_every is not None or self.checkpoint_seconds is not None


def settle(asked: Mapping[str, Any], world: World, *, quick: bool = False) -> TrainSettings:
    """Complete the settings and check that they fit together.

    ``asked`` has fields of ``TrainSettings``; None or missing values get the default of data and
    model. ``methods`` may contain ``"all"``. Fewer ``devices`` than stages each get a contiguous
    run of stages. ``seeds`` is their number or the seeds themselves, ``replicas`` one number for
    all stages or one per stage, which ``world`` receives.
    """
    options = {name: value for name, value in asked.items() if value is not None}
    world.replicas = _replicas(options.get("replicas"), world)
    options["replicas"] = world.replicas.counts if world.replicas.dealt else None
    options["stages"] = stages = _stages(options.get("stages"), world)
    try:  # also for methods with a fixed schedule
        numbers_of(options.get("window"), stages)
    except ValueError as error:
        raise OptionError("window", str(error)) from error
    if "workload" in options:
        _fill_own(options, quick)
    else:
        _fill_preset(options, quick)
    seeds = options["seeds"]
    options["seeds"] = tuple(dict.fromkeys(range(seeds) if isinstance(seeds, int) else seeds))
    options["methods"] = choose_methods(options.get("methods") or DEFAULT_METHODS)
    options["devices"] = choose_devices(options.get("devices", ["cpu"]), stages, world.local_rank)
    return TrainSettings(**options)


def _fill_preset(options: dict[str, Any], quick: bool) -> None:
    """Take the preset's values for what is missing; reject options without effect."""
    data = options.setdefault("data", "digits")
    model = options.setdefault("model", DEFAULT_MODEL[data])
    known, folder = models_for(data), options.get("data_dir")
    if model not in known:
        raise OptionError(
            "model", f"{model} cannot be trained on {data}; its models are {', '.join(known)}"
        )
    if data == "digits" and folder is not None:
        raise OptionError(
            "data-dir",
            "the digits come with scikit-learn; --data cifar10 and text are read from files",
        )
    if data != "digits" and folder is None:
        raise OptionError(
            "data-dir", f"--data {data} is read from files: --data-dir names their folder"
        )
    for name, value in dataclasses.asdict(preset(data, model, quick=quick)).items():
        options.setdefault(name, value)
    optimizer = options["optimizer"]
    for option in ("momentum", "nesterov"):
        if optimizer != "sgd" and options.get(option, False) is not False:
            raise OptionError(
                option, f"is SGD's, and the optimizer is {optimizer}: --optimizer sgd"
            )
    if model == "inception-v4" and options["depth"] is not None:
        raise OptionError("depth", "inception-v4 has the one that it has")
    if options.get("augment") and data != "cifar10":
        raise OptionError("augment", f"varies images, and --data {data} has none")


def _fill_own(options: dict[str, Any], quick: bool) -> None:
    """Pass the options to the function or reject them; the function decides the rest."""
    name = options["workload"]
    known = parameters_of(name)
    for option in ("data", "model"):
        if option in options:
            raise OptionError(option, "is of the built-in workloads, and --workload has another")
    given = {key: options.pop(key) for key in OFFERED if key in options}
    given = {key: value for key, value in given.items() if value is not False}
    for key in (*given, *(["lr"] if "lr" in options else [])):
        if key not in known:
            option = key.replace("_", "-")
            raise OptionError(option, f"{name} has no parameter {key!r} to get it by")
    options.setdefault("lr", start_rate(name))
    if options["lr"] is None:
        if "lr" in known:
            raise OptionError("lr", f"{name} has a parameter 'lr' without a default: expected --lr")
        options["lr"] = 0.0
    options.setdefault("epochs", 1)
    options.setdefault("seeds", 1 if quick else 3)
    options["given"] = tuple(
        (key, str(value) if isinstance(value, Path) else value) for key, value in given.items()
    )
    options |= {"data": "", "model": "", "optimizer": "", "lr_schedule": "constant"}
    options |= {"batch_size": 0, "width": 0, "depth": None, "context": 0}
    options |= {"weight_decay": 0.0, "warmup": 0}


def _replicas(given: int | Sequence[int] | None, world: World) -> Replicas:
    try:
        return Replicas.of(given, world.size)
    except ValueError as error:
        hint = "" if world.together else "; torchrun starts more: see docs/distributed.md"
        raise OptionError("replicas", f"{error}{hint}") from error


def _stages(given: int | None, world: World) -> int:
    if not world.together:
        return given or TrainSettings.stages
    there = world.replicas.stages
    if given not in (None, there):
        what = "one for each process that torchrun started"
        if world.replicas.dealt:
            counts = ",".join(map(str, world.replicas.counts))
            what = f"for {world.size} processes and --replicas {counts}"
        raise OptionError("stages", f"expected {there}, {what}, got {given}")
    return there


def choose_devices(names: Sequence[str], stages: int, local_rank: int = 0) -> tuple[str, ...]:
    """Return one device name per stage from at most ``stages`` names.

    Fewer devices than stages each get a contiguous run of stages. ``local_rank`` is the number of
    the CUDA device for names without one.
    """
    if not 1 <= len(names) <= stages:
        raise OptionError(
            "devices", f"expected 1 to {stages} devices for {stages} stages, got {len(names)}"
        )
    for position, name in enumerate(names):
        where = f"entry {position} is {name!r}"
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise OptionError("devices", f"{where}, expected cpu, cuda or cuda:<number>")
        index = local_rank if device.index is None else device.index
        if device.type == "cuda" and index >= torch.cuda.device_count():
            raise OptionError(
                "devices",
                f"{where}, but torch sees {torch.cuda.device_count()} CUDA devices ('spectrain "
                "doctor' says why)",
            )
    return tuple(names[stage * len(names) // stages] for stage in range(stages))


def choose_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Return the named methods without duplicates; ``"all"`` means every registered method."""
    known = methods()
    called: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if is_imported(name):
            try:
                other = called.setdefault(method_of(name).name, name)
            except ValueError as error:
                raise OptionError("method", str(error)) from error
            if other != name:
                both = f"{other!r} and {name!r} are both called {method_of(name).name!r}"
                raise OptionError("method", f"{both}; expected another name for each")
        elif name not in (*known, ALL):
            try:
                called[find_method(name).name] = name
            except ValueError as error:
                raise OptionError("method", str(error)) from error
    return (*known, *called.values()) if ALL in names else tuple(dict.fromkeys(names))


def stages_of(method: Method, settings: TrainSettings) -> int:
    """Return the number of stages of a method: the settings' or the largest it supports."""
    return min(settings.stages, method.max_stages or settings.stages)


def microbatches_in(method: Method, settings: TrainSettings) -> int:
    """Return the settings' microbatches, or the method's usual number."""
    if settings.microbatches != "auto":
        return settings.microbatches
    stages = stages_of(method, settings)
    dealt = settings.replicas if stages == settings.stages else None
    return microbatches_of(method, stages, None if dealt is None else Replicas(dealt))


def window_of(method: Method, settings: TrainSettings) -> Window:
    """Return the settings' window if the method's schedule lets you choose one."""
    chosen = any(takes_window(phase.schedule) for phase in phases_of(method))
    return settings.window if chosen else None
