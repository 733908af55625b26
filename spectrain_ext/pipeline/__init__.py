"""Runs all stages of a pipeline in one process.

In the order in which a minibatch meets them: ``pipeline`` is what people call, and ``arguments``
checks what it is given; ``executor`` interprets the stages' instructions one after another;
``connections`` join the stages to one another and to the caller by ``edges``, where minibatches are
cut into microbatches by ``batch``; ``loads`` say which weights a ``stage`` computes with, which
keeps a ``tape`` until the backward; ``losses`` go out again. An ``observer`` may look on. ``loops``
make whole trainings of runs, and measure the model between them. ``delayed``
computes the same, or with other delays, without instructions and edges.
"""

from spectrain_ext.transport import Microbatches

from .delayed import Delayed
from .losses import Result
from .observer import Observer
from .pipeline import Pipeline

__all__ = ["Delayed", "Microbatches", "Observer", "Pipeline", "Result"]
