"""Runs all stages of a pipeline in one process.

Modules, in the order in which a minibatch passes them: ``pipeline`` is the interface, and
``arguments`` checks what it gets. An ``executor`` begins and ends runs; ``run`` has the loop. The
``wires`` join the stages to one another and to the caller by ``edges``, where ``batch`` splits
minibatches into microbatches. In one run, a ``stage`` is a ``stage_run``: ``updates`` selects and
changes its weights, ``compute`` runs forwards and backwards, of which a ``tape`` holds what is
needed. ``passes`` add to that. ``losses`` go back to the caller. An
``observer`` may watch a run. ``loops`` builds training from runs, ``evaluation`` an evaluation, and
``segments`` one training from several runs.
"""

from typing import TYPE_CHECKING, Any

from spectrain_ext.transport import Microbatches

from .losses import Result
from .passes import Handler
from .pipeline import Pipeline
from .stage import Stage
from .stage_run import StageRun

if TYPE_CHECKING:
    from .observer import ACTIONS, Observer

__all__ = [
    "ACTIONS",
    "Handler",
    "Microbatches",
    "Observer",
    "Pipeline",
    "Result",
    "Stage",
    "StageRun",
]


def __getattr__(name: str) -> Any:
    if name not in ("ACTIONS", "Observer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import observer  # loaded on first use

    return getattr(observer, name)
