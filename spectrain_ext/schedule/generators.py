"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .actions import Action
from .gpipe import gpipe
from .one_f_one_b import asynchronous, flushing
from .place import Place

#: A schedule: a stage's place -> its endless actions, made one by one as they are asked for.
Generator = Callable[[Place], Iterator[Action]]

GENERATORS: dict[str, Generator] = {
    "1f1b-async": asynchronous,
    "gpipe": gpipe,
    "1f1b": flushing,
}

#: Those that finish a minibatch on all stages before the next one begins: synchronous training.
FLUSHING = frozenset({"gpipe", "1f1b"})


def find_generator(schedule: str) -> Generator:
    """The schedule of that name.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if schedule not in GENERATORS:
        raise ValueError(f"schedule: there is no {schedule!r}; there are {', '.join(GENERATORS)}")
    return GENERATORS[schedule]
