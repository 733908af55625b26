"""Plans how to train a model on a number of devices, from measured layer times."""

from .applied import planned_cut as planned_cut
from .layers import LINKS, Layers, Link, find_link, measure_layers, read_layers, write_layers
from .training_plan import HOST_SECONDS, METHODS, Candidate, TrainingPlan, plan, write_plan

__all__ = [
    "HOST_SECONDS",
    "LINKS",
    "METHODS",
    "Candidate",
    "Layers",
    "Link",
    "TrainingPlan",
    "find_link",
    "measure_layers",
    "plan",
    "read_layers",
    "write_layers",
    "write_plan",
]
