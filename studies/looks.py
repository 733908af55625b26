"""Assigns each method one colour and one dash pattern, the same in every picture."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

Dashes = str | tuple[int, tuple[float, ...]]

REFERENCE = "sync"

# The palette of Okabe and Ito, distinguishable with any colour vision, and four more colours for
# methods that are rarely compared. Dashes distinguish the lines in print, and lines of the same
# colour. Related methods share a colour; methods that flush are black or grey.
_SOLID: Dashes = "solid"
_LONG: Dashes = (0, (6, 1.5))
_MIXED: Dashes = (0, (4, 1.2, 1, 1.2))
_DOTTED: Dashes = (0, (1, 1))
_SHORT: Dashes = (0, (3, 1))
_DASHES = (_LONG, _MIXED, _SOLID, _DOTTED, _SHORT, (0, (4, 1, 1, 1, 1, 1)))


class Look(NamedTuple):
    """How a method is drawn."""

    color: str
    dashes: Dashes


_TABLE = {
    "sync": Look("#000000", _SOLID),
    "1f1b": Look("#000000", _SHORT),
    "interleaved": Look("#777777", _LONG),
    "interleaved-async": Look("#009E73", _MIXED),
    "wpipe": Look("#CC79A7", _SHORT),
    "gpipe": Look("#777777", _DOTTED),
    "zb-h1": Look("#777777", _MIXED),
    "data-parallel-4": Look("#777777", _SHORT),
    "vanilla": Look("#D55E00", _LONG),
    "pipedream": Look("#E69F00", _MIXED),
    "pipedream-vertical-sync": Look("#E69F00", _DOTTED),
    "pipedream-2bw": Look("#CC79A7", _LONG),
    "spectrain": Look("#0072B2", _SOLID),
    "spectrain-local": Look("#0072B2", _LONG),
    "spectrain-smoothed": Look("#0072B2", _DOTTED),
    "spectrain-stash": Look("#56B4E9", _LONG),
    "second-order": Look("#009E73", _LONG),
    "auto": Look("#009E73", _SOLID),
    "auto-4": Look("#009E73", _SHORT),
    "zb-h1-async": Look("#009E73", _DOTTED),
    "pipeoptim": Look("#882255", _SOLID),
    "xpipe": Look("#882255", _LONG),
    "msnag": Look("#999933", _SOLID),
    "msnag-stash": Look("#999933", _LONG),
    "lwp-v": Look("#44AA99", _MIXED),
    "lwp-w": Look("#44AA99", _DOTTED),
    "xgrad": Look("#332288", _MIXED),
    "sc": Look("#D55E00", _DOTTED),
    "sc-lwp": Look("#44AA99", _SHORT),
    "error-feedback": Look("#CC79A7", _DOTTED),
    "braking": Look("#E69F00", _LONG),
    "dc-asgd": Look("#E69F00", _SOLID),
    "gap-aware": Look("#E69F00", _SHORT),
    "pipemare-t1": Look("#332288", _DOTTED),
    "pipemare-t2": Look("#332288", _LONG),
    "pipemare": Look("#332288", _SOLID),
}
_COLORS = ("#882255", "#332288", "#44AA99", "#999933", "#CC79A7", "#56B4E9", "#E69F00", "#D55E00")


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return the looks of methods in one picture: fixed for known ones, free ones for others."""
    wanted = list(dict.fromkeys(names))
    found = {name: _TABLE[name] for name in wanted if name in _TABLE}
    taken = set(found.values())
    others = (look for number in count() if (look := _other(number)) not in taken)
    return {name: found.get(name) or next(others) for name in wanted}


def _other(number: int) -> Look:
    """Return look ``number`` of the other methods; the first 48 are distinct."""
    turn, color = divmod(number, len(_COLORS))
    return Look(_COLORS[color], _DASHES[(color + turn) % len(_DASHES)])
