"""Defines ``Cut``: what a stage knows of the model that it was cut from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn


class BatchColumns(Protocol):
    """The columns of a batch that a model takes."""

    def kept(self, batch: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the columns to keep; TypeError if they do not fit."""


class Origin(Protocol):
    """The model that stages were cut from."""

    def trained_elsewhere(self, stages: Sequence[int]) -> None:
        """Note that other processes train these stages of it."""


@dataclass(frozen=True)
class Cut:
    """The knowledge of a stage about the model that it was cut from: its attribute ``cut``.

    ``partition`` and ``cut_at`` set it. Set one on stages that you cut yourself; every field may be
    left out, and so may ``cut``. ``torch.compile`` and copies of a stage preserve it.

    Attributes:
        index: the stage's number in the cut, from 0. Pipelines refuse stages in another order.
        count: the number of stages in the cut; 0: unknown, and so is the order.
        prefixes: how the model's names begin, by the beginnings of this stage's, the longest of
            which counts: ``{"": "decoder."}``. None: unknown; names are ``nn.Sequential``'s.
        ties: parameters that an earlier stage holds too, by their names here: the index of the
            first stage with the parameter and its name there. ``DistributedPipeline`` needs this,
            because it sees only its own stages; ``Pipeline`` recognizes the shared objects.
        copied_buffers: names of buffers that an earlier stage holds under the same name and saves.
        columns: of a batch that is a mapping, what the first stage takes; None: all of it.
        names: the model's names of the tensors of all stages. ``materialize`` uses them to tell
            which tensors a file may hold.
        tied_names: all names that the model has for a tensor with several, by its names here.
        origin: the model, while it exists.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> first, last = st.partitioning.cut_at(model, [2, 3])
        >>> last.cut.index, last.cut.count, last.cut.full_name("0.weight")
        (1, 2, '2.weight')
        >>> own = nn.Linear(8, 2)
        >>> own.cut = st.partitioning.Cut(prefixes={"": "head."})
    """

    index: int = 0
    count: int = 0
    prefixes: Mapping[str, str] | None = None
    ties: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    copied_buffers: Set[str] = frozenset()
    columns: BatchColumns | None = None
    names: Set[str] = frozenset()
    tied_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    origin: Origin | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """Index and count; None: unknown."""
        return (self.index, self.count) if self.count else None

    def full_name(self, name: str) -> str:
        """Return the model's name of a parameter or module buffer of this stage."""
        prefixes = self.prefixes or {}
        longest = max(filter(name.startswith, prefixes), key=len, default=None)
        return name if longest is None else prefixes[longest] + name.removeprefix(longest)


_UNKNOWN = Cut()


def cut_of(stage: nn.Module) -> Cut:
    """Return what a stage knows of its model; of one that was not cut, nothing."""
    cut = getattr(stage, "cut", None)
    return cut if isinstance(cut, Cut) else _UNKNOWN


def change_cut(stage: nn.Module, where: str, **changes: Any) -> None:
    """Set fields of a stage's ``cut``; TypeError if it has another attribute of that name."""
    present = getattr(stage, "cut", None)
    if present is not None and not isinstance(present, Cut):
        raise TypeError(
            f"{where}: its attribute 'cut' is a {type(present).__name__}, expected none, or a "
            "spectrain_ext.partitioning.Cut, which says what a stage knows of its model; rename it"
        )
    vars(stage)["cut"] = replace(cut_of(stage), **changes)
