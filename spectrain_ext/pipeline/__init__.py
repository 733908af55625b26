"""Runs all stages of a pipeline in one process.

In the order in which a minibatch meets them: ``pipeline`` is what people call, and ``arguments``
checks what it is given; ``executor`` runs the stages' actions one after another, as ``cursor``
reads them off the schedule; ``neighbourhood`` joins the stages to one another and to the caller,
whose minibatches ``batch`` cuts into microbatches; ``stage`` does what each action says, keeps a
``tape`` from forward to backward, or, ``recomputing``, only its inputs; ``losses`` go out again;
``clipping`` comes before the update. An ``observer`` may look on. ``loops`` make whole trainings of
runs, and measure the model between them, by an ``evaluation``.
"""

from .losses import Result
from .observer import Observer
from .pipeline import Pipeline

__all__ = ["Observer", "Pipeline", "Result"]
