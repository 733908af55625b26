"""Runs all stages of a pipeline in one process.

``pipeline`` is the interface; ``arguments`` checks what it gets, ``factories`` make optimizers, and
``applied_method`` applies a method to stages. ``wires`` join the stages to one another and to the
caller, whose batches ``source`` takes. ``training``, ``evaluation`` and ``fitting`` make a ``run``,
which begins, lets its stages advance, and ends. In one run a ``stage`` is a ``stage_run``:
``loads`` selects its weights, ``compute`` runs forwards and backwards, of which a ``tape`` holds
what is needed, ``updates`` changes its weights. ``passes`` add to that. ``losses`` go back to the
caller, whose loop ``loops`` follows. An ``observer`` may watch a run.
"""

from typing import TYPE_CHECKING

from spectrain_ext.later import attributes
from spectrain_ext.transport import Microbatches

from .losses import Result
from .passes import Handler
from .pipeline import Pipeline
from .stage import Stage
from .stage_run import StageRun

if TYPE_CHECKING:
    from .observer import SHOWN_STEPS, Observer

__all__ = [
    "SHOWN_STEPS",
    "Handler",
    "Microbatches",
    "Observer",
    "Pipeline",
    "Result",
    "Stage",
    "StageRun",
]


__getattr__, __dir__ = attributes(__name__, dict.fromkeys(("Observer", "SHOWN_STEPS"), "observer"))
