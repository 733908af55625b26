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

from spectrain_ext.transport import Microbatches

from .losses import Result
from .pipeline import Pipeline

__all__ = ["Microbatches", "Pipeline", "Result"]
