"""GPipe: all forwards of a minibatch, all its backwards, one update; then the next minibatch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from .actions import Action
from .moves import backward, forward
from .place import Place


def gpipe(place: Place) -> Iterator[Action]:
    """The endless actions of a stage: a flush after every minibatch (Huang et al., 2019).

    Three microbatches on every stage, ``u`` the update:

        F0 F1 F2 b0 b1 b2 u   F0 F1 F2 b0 b1 b2 u

    The window is the number of microbatches, whatever the place says.
    """
    for i in count():
        for j in range(place.microbatches):
            yield from forward(place, i, j)
        for j in range(place.microbatches):
            yield from backward(place, i, j)
