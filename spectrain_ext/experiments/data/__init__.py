"""Data sets that the command line trains on, and the order in which they are visited."""

from .batches import count_batches, shuffled_batches, training_batches
from .cifar import load_cifar10
from .digits import load_digits
from .split import Split
from .text import load_text

__all__ = [
    "Split",
    "count_batches",
    "load_cifar10",
    "load_digits",
    "load_text",
    "shuffled_batches",
    "training_batches",
]
