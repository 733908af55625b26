"""Fused weight prediction, and asynchronous pipeline training that stands on it (SpecTrain)."""

import logging as _logging
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from spectrain_ext import _interpreter  # noqa: F401  # isort: skip  # before torch, which would hang

import torch as _torch  # noqa: F401  # before _C, so that both use the OpenMP runtime torch brings

from spectrain_ext import laws, optim, partitioning
from spectrain_ext import library as _library  # noqa: F401  # registers torch.ops.spectrain
from spectrain_ext._C import build_info as _build_info
from spectrain_ext._expressions import Scalar
from spectrain_ext.errors import (
    CheckpointError,
    OrderingError,
    RankError,
    StageError,
)
from spectrain_ext.method import Method, methods, second_order, xgrad
from spectrain_ext.metrics import Metrics
from spectrain_ext.observer import Observer
from spectrain_ext.ops import (
    adam_predict,
    adam_step_,
    distance,
    extrapolate,
    predict,
    predict_,
    restore_,
    sgd_step_,
    stash,
    stash_predict_,
    swap_,
)
from spectrain_ext.partitioning import partition
from spectrain_ext.pipeline import Pipeline
from spectrain_ext.plan import Plan
from spectrain_ext.schedule import ScheduleError
from spectrain_ext.trace import Trace

if TYPE_CHECKING:
    from spectrain_ext import checkpoint

# What the library has to say goes to whoever asks for it, and nowhere else.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())

__version__: str = _build_info()["version"]

__all__ = [
    "CheckpointError",
    "Method",
    "Metrics",
    "Observer",
    "OrderingError",
    "Pipeline",
    "Plan",
    "RankError",
    "Scalar",
    "ScheduleError",
    "StageError",
    "Trace",
    "__version__",
    "adam_predict",
    "adam_step_",
    "checkpoint",
    "distance",
    "extrapolate",
    "laws",
    "methods",
    "optim",
    "partition",
    "partitioning",
    "predict",
    "predict_",
    "restore_",
    "second_order",
    "sgd_step_",
    "stash",
    "stash_predict_",
    "swap_",
    "xgrad",
]


def __getattr__(name: str) -> _Any:
    if name == "checkpoint":  # torch.distributed.checkpoint takes as long to import as torch
        return _import_module("spectrain_ext.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
