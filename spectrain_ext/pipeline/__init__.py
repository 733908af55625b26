"""Runs all stages of a pipeline in one process."""

from .losses import Result
from .observer import Observer
from .pipeline import Pipeline

__all__ = ["Observer", "Pipeline", "Result"]
