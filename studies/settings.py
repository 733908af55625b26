"""Completes and validates the settings of a comparison; defaults per data set and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from spectrain_ext.method import Method, methods, microbatches_of
from spectrain_ext.tools.commands.options import method_of

from .options import OptionError
from .workload import OFFERED, parameters_of, start_rate

Optimizer = Literal["sgd", "adam", "adamw", "nadam", "lion", "muon", "soap", "basis-rotation"]


# Options by data set and model. Without a depth it is the model's own.
_MLP = {"epochs": 6, "batch_size": 16, "width": 64, "lr": 0.05, "optimizer": "sgd", "seeds": 5}
_DECAYING = dict(_MLP, lr_schedule="cosine", seeds=3)
_VISION = dict(_DECAYING, epochs=60, batch_size=128, weight_decay=5e-4, warmup=400)
_TEXT = dict(_DECAYING, epochs=10, batch_size=32, width=256, lr=0.5, warmup=100, context=128)
_PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("digits", "residual-mlp"): _MLP,
    ("cifar10", "residual-mlp"): dict(_VISION, epochs=20, width=256, lr=0.02, weight_decay=0.0),
    ("cifar10", "vgg16"): _VISION,
    ("cifar10", "resnet"): _VISION,
    # at its original width; CIFAR-10 images are resized to 75 pixels
    ("cifar10", "inception-v4"): dict(_VISION, width=32),
    ("cifar10", "snn"): dict(_VISION, width=1024, lr=0.005, weight_decay=0.0),
    ("text", "gpt"): dict(_TEXT, depth=6, lr=3e-4, optimizer="adamw", weight_decay=0.01),
    ("text", "lstm"): dict(_TEXT, depth=6),
    # nanoGPT's small character-level setting for a CPU, as in its README and train.py
    ("text", "nanogpt"): {
        **{"epochs": 2, "batch_size": 12, "width": 128, "depth": 4, "context": 64, "lr": 0.001},
        **{"optimizer": "adamw", "betas": (0.9, 0.99), "weight_decay": 0.1, "clip_norm": 1.0},
        **{"lr_schedule": "cosine", "lr_floor": 0.1, "warmup": 100, "decays_vectors": False},
        "seeds": 3,
    },
    # rates are relative to that of hidden matrices, see ``make_any_optimizer``
    ("text", "speedrun"): dict(_TEXT, lr=0.025, optimizer="muon", weight_decay=0.05),
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
    return tuple(model for known, model in _PRESETS if known == data)


def preset(data: str, model: str, *, quick: bool) -> dict[str, Any]:
    changes = {**_QUICK[data], **_QUICK_MODEL.get((data, model), {})} if quick else {}
    return {**_PRESETS[data, model], **changes}


#: The default methods: synchronous training, plain and with the most overlap, one asynchronous
#: method of each kind, and the package's default.
DEFAULT_METHODS = ("sync", "1f1b", "vanilla", "pipedream", "spectrain", "spectrain-stash", "auto")
ALL = "all"
STAGES = 8
AUTO = "auto"  # the method that reports its choice


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a comparison; those that the function of --workload decides are empty or 0."""

    workload: str | None = None  # module:function
    given: tuple[tuple[str, Any], ...] = ()  # what it is called with as well
    data: str = ""
    data_dir: Path | None = None
    model: str = ""
    methods: tuple[str, ...]  # names or module:NAME
    seeds: tuple[int, ...]
    stages: int
    devices: tuple[str, ...]  # one per stage
    epochs: int
    batch_size: int = 0
    microbatches: int | Literal["auto"] = "auto"  # auto: each method's usual number
    codec: str | None = None  # name of the edge codec
    rank: int | None = None  # of the subspace on the edges of the model speedrun
    clip_norm: float | None = None
    width: int = 0
    depth: int | None = None  # None: the model's own
    context: int = 0
    train_samples: int | None = None  # None: all
    test_samples: int | None = None
    augment: bool = False
    optimizer: str = ""
    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    state_dtype: str | None = None  # of moments; None: the parameters'
    weight_decay: float = 0.0
    decays_vectors: bool = True  # whether weight decay includes parameters with one dimension
    nesterov: bool = False
    lr_schedule: str = "constant"
    lr_floor: float = 0.0  # the lowest learning rate of a cosine, over ``lr``
    warmup: int = 0
    threads: int = 1
    updates: int | None = None  # None: as many as the epochs have


def settle(asked: Mapping[str, Any], *, quick: bool = False) -> TrainSettings:
    """Complete the settings and check that they fit together.

    ``asked`` has fields of ``TrainSettings``; None or missing values get the default of data and
    model. ``methods`` may contain ``"all"``. Fewer ``devices`` than stages each get a contiguous
    run of stages. ``seeds`` is their number.
    """
    options = {name: value for name, value in asked.items() if value is not None}
    stages = options.setdefault("stages", STAGES)
    if "workload" in options:
        _fill_own(options, quick)
    else:
        _fill_preset(options, quick)
    options["seeds"] = tuple(range(options["seeds"]))
    options["methods"] = choose_methods(options.get("methods") or DEFAULT_METHODS)
    options["devices"] = choose_devices(options.get("devices", ["cpu"]), stages)
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
    for name, value in preset(data, model, quick=quick).items():
        options.setdefault(name, value)
    optimizer = options["optimizer"]
    for option in ("momentum", "nesterov"):
        if optimizer != "sgd" and options.get(option, False) is not False:
            raise OptionError(
                option, f"is SGD's, and the optimizer is {optimizer}: --optimizer sgd"
            )
    if model == "inception-v4" and options.get("depth") is not None:
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


def choose_devices(names: Sequence[str], stages: int) -> tuple[str, ...]:
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
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
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
        if name in (*known, ALL):
            continue
        try:
            method = method_of(name)
        except ValueError as error:
            raise OptionError("method", str(error)) from error
        other = called.setdefault(method.name, name)
        if other != name:
            both = f"{other!r} and {name!r} are both called {method.name!r}"
            raise OptionError("method", f"{both}; expected another name for each")
    return (*known, *called.values()) if ALL in names else tuple(dict.fromkeys(names))


def stages_of(method: Method, settings: TrainSettings) -> int:
    """Return the number of stages of a method: the settings' or the largest it supports."""
    return min(settings.stages, method.max_stages or settings.stages)


def microbatches_in(method: Method, settings: TrainSettings) -> int:
    """Return the settings' microbatches, or the method's usual number."""
    if settings.microbatches != "auto":
        return settings.microbatches
    return microbatches_of(method, stages_of(method, settings))
