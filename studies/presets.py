"""Default sizes and rates of ``studies train`` for each data set and model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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
_VISION = Preset(
    *(60, 128, 64, None, 0.05),
    weight_decay=5e-4,
    lr_schedule="cosine",
    warmup=400,
    seeds=3,
)
_TEXT = Preset(
    *(10, 32, 256, 6, 0.5),
    lr_schedule="cosine",
    warmup=100,
    context=128,
    seeds=3,
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
_SMALL_IMAGES = {
    **{"epochs": 2, "batch_size": 32, "width": 8, "lr": 0.02, "warmup": 30, "seeds": 1},
    **{"train_samples": 3072, "test_samples": 1000},
}
_SMALL_TEXT = {
    **{"epochs": 1, "batch_size": 16, "width": 64, "context": 64, "warmup": 30, "seeds": 1},
    **{"train_samples": 4096, "test_samples": 512},
}
_QUICK: dict[tuple[str, str], dict[str, object]] = {
    ("digits", "residual-mlp"): {"epochs": 1, "seeds": 1},
    ("cifar10", "residual-mlp"): {**_SMALL_IMAGES, "width": 128},
    ("cifar10", "vgg16"): {**_SMALL_IMAGES},
    ("cifar10", "resnet"): {**_SMALL_IMAGES},
    ("cifar10", "inception-v4"): {
        **{**_SMALL_IMAGES, "width": 4},
        # SGD is still at chance accuracy after this time
        **{"optimizer": "adam", "lr": 0.004, "weight_decay": 0.0},
    },
    ("cifar10", "snn"): {**_SMALL_IMAGES, "width": 128, "lr": 0.005},
    ("text", "gpt"): {**_SMALL_TEXT},
    ("text", "lstm"): {**_SMALL_TEXT},
    ("text", "speedrun"): {**_SMALL_TEXT},
}

DATA_SETS = tuple(dict.fromkeys(data for data, _ in _PRESETS))
MODELS = tuple(dict.fromkeys(model for _, model in _PRESETS))
DEFAULT_MODEL = {"digits": "residual-mlp", "cifar10": "resnet", "text": "gpt"}


def models_for(data: str) -> tuple[str, ...]:
    """Return the models that can be trained on a data set."""
    return tuple(model for known, model in _PRESETS if known == data)


def preset(data: str, model: str, *, quick: bool) -> Preset:
    """Return the defaults for a data set and one of its models."""
    found = _PRESETS[data, model]
    return replace(found, **_QUICK[data, model]) if quick else found  # type: ignore[arg-type]
