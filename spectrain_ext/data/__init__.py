"""Data sets that the command line trains on, and the order in which they are visited."""

from spectrain_ext.data.batches import count_batches, shuffled_batches
from spectrain_ext.data.digits import load_digits
from spectrain_ext.data.split import Split

__all__ = ["Split", "count_batches", "load_digits", "shuffled_batches"]
