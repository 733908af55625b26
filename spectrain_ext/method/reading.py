"""What a method reads at one place, in the terms of the schedule's tools."""

from __future__ import annotations

from spectrain_ext.schedule import Place, Rules

from .choices import choices_at
from .value import Method


def reading_rules(method: Method, place: Place) -> Rules:
    """Which weights a method has one stage compute with, for ``schedule.validate`` and the like.

    Raises:
        ValueError: the method contradicts itself, or is not defined for the place.
    """
    choices = choices_at(method, place)
    return Rules(
        reads=choices.reads,
        once=choices.once,
        ahead="counted" if choices.forward is None else choices.forward + choices.lead,
        backward=choices.backward,
        backward_ahead=choices.backward_ahead,
        differences=choices.law == "difference" and choices.predicts,
    )
