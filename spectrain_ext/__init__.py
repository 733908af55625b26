"""Fused weight prediction, and asynchronous pipeline training that uses it (SpecTrain)."""

import logging as _logging
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

try:
    _interpreters = _import_module("_interpreters")  # Python 3.13
except ImportError:
    _interpreters = _import_module("_xxsubinterpreters")
if _interpreters.get_current() != _interpreters.get_main():  # in which importing torch would hang
    raise ImportError("spectrain_ext: torch cannot be used in a subinterpreter")

import torch as _torch  # noqa: F401  # before _C, so that both use the OpenMP runtime torch brings

try:
    from spectrain_ext._C import build_info as _build_info
except ModuleNotFoundError as _error:
    if _error.name != f"{__name__}._C":
        raise
    raise ImportError(
        f"spectrain_ext is not built here: {__path__[0]} has no native module (_C) for this "
        'Python. In a clone run "pip install .", and start Python in another directory, where it '
        "finds what that installed",
        name=_error.name,
    ) from None
from spectrain_ext import operators as _operators
from spectrain_ext import optim
from spectrain_ext.errors import CheckpointError, RankError, StageError
from spectrain_ext.later import NAMES as _NAMES
from spectrain_ext.later import Moved as _Moved
from spectrain_ext.method import (
    Method,
    Phase,
    hybrid,
    interleaved,
    methods,
    pipemare,
    second_order,
    spectrain,
)
from spectrain_ext.operators import laws
from spectrain_ext.pipeline import Microbatches, Pipeline
from spectrain_ext.schedule import ScheduleError

if TYPE_CHECKING:
    from spectrain_ext import checkpoint, partitioning, passes
    from spectrain_ext.distributed import DistributedPipeline, join_ranks
    from spectrain_ext.operators import (
        Plan,
        adam_predict,
        adam_step_,
        distance,
        extrapolate,
        lion_predict,
        lion_step_,
        predict,
        predict_,
        restore_,
        sgd_step_,
        stash,
        stash_predict_,
        swap_,
    )
    from spectrain_ext.partitioning import partition
    from spectrain_ext.passes import averaging, codecs, corrections
    from spectrain_ext.pipeline import Observer
    from spectrain_ext.tools.metrics import Metrics, Trace
    from spectrain_ext.tools.models import materialize

# The library logs to configured handlers only.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())

__version__: str = _build_info()["version"]

__all__ = [
    "CheckpointError",
    "DistributedPipeline",
    "Method",
    "Metrics",
    "Microbatches",
    "Observer",
    "Phase",
    "Pipeline",
    "Plan",
    "RankError",
    "ScheduleError",
    "StageError",
    "Trace",
    "__version__",
    "adam_predict",
    "adam_step_",
    "averaging",
    "checkpoint",
    "codecs",
    "corrections",
    "distance",
    "extrapolate",
    "hybrid",
    "interleaved",
    "join_ranks",
    "laws",
    "lion_predict",
    "lion_step_",
    "materialize",
    "methods",
    "optim",
    "partition",
    "partitioning",
    "passes",
    "pipemare",
    "predict",
    "predict_",
    "restore_",
    "second_order",
    "sgd_step_",
    "spectrain",
    "stash",
    "stash_predict_",
    "swap_",
]


# Loaded on first use: torch.distributed.checkpoint alone takes as long to import as torch. Each is
# a module, or in one.
_LATER = {
    **{name: _NAMES[name] for name in ("Metrics", "Trace", "materialize", "plan", "simulate")},
    "DistributedPipeline": "distributed",
    "Observer": "pipeline",
    "averaging": "passes.averaging",
    "checkpoint": "checkpoint",
    "codecs": "passes.codecs",
    "corrections": "passes.corrections",
    "join_ranks": "distributed",
    "partition": "partitioning",
    "partitioning": "partitioning",
    "passes": "passes",
    "tools": "tools",
    **dict.fromkeys(_operators.__all__, "operators"),
}
_sys.meta_path.append(_Moved)


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _LATER[name]
    module = _import_module(f"{__name__}.{room}")
    is_module = room.rpartition(".")[2] == name
    value = globals()[name] = module if is_module else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
