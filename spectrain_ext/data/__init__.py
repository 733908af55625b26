"""Data sets that the command line trains on, and the order in which they are visited."""

from spectrain_ext.data.batches import count_batches, shuffled_batches, training_batches
from spectrain_ext.data.cifar import load_cifar10
from spectrain_ext.data.digits import load_digits
from spectrain_ext.data.split import Split
from spectrain_ext.data.text import load_text

__all__ = [
    "Split",
    "count_batches",
    "load_cifar10",
    "load_digits",
    "load_text",
    "shuffled_batches",
    "training_batches",
]
