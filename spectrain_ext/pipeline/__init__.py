"""Runs all stages of a pipeline in one process.

Modules, in the order in which a minibatch passes them: ``pipeline`` is the interface, and
``arguments`` checks what it gets. ``executor`` interprets the stages' instructions. ``connections``
joins the stages to one another and to the caller by ``edges``, where ``batch`` splits minibatches
into microbatches. ``loads`` selects the weights that a ``stage`` computes with; a ``tape`` holds
what its backward needs. ``losses`` go back to the caller. An ``observer`` may watch a run.
``loops`` builds training from runs, ``evaluation`` an evaluation, and ``segments`` one training
from several runs.
"""

from spectrain_ext.transport import Microbatches

from .losses import Result
from .observer import Observer
from .pipeline import Pipeline

__all__ = ["Microbatches", "Observer", "Pipeline", "Result"]
