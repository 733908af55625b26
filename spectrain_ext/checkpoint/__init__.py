"""Saves and loads checkpoints atomically, for any number of stages."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spectrain_ext.errors import CheckpointError

from .parts import Stateful
from .saving import save

if TYPE_CHECKING:
    from .loading import Loaded, load
    from .manager import CheckpointManager
    from .sampler import ShuffledSampler

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Loaded",
    "ShuffledSampler",
    "Stateful",
    "load",
    "save",
]

_ON_FIRST_USE = {
    "CheckpointManager": "manager",
    "Loaded": "loading",
    "ShuffledSampler": "sampler",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
