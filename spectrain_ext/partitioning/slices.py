"""Slice: consecutive blocks of a model as one stage, which knows their names in the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from .profile import Tie
from .traced import TracedStage


class Slice(nn.Sequential):
    """Blocks ``first``, ``first + 1``, ... of a model, one after another.

    Args:
        blocks: the modules, shared with the model they come from.
        first: index of the first of them in that model.

    ``full_name`` tells what the model, ``nn.Sequential(*all_blocks)``, calls a parameter or module
    buffer, which does not depend on where the cuts are: checkpoints use these names.
    """

    def __init__(self, blocks: Iterable[nn.Module], first: int) -> None:
        super().__init__(*blocks)
        self.first = first

    def full_name(self, name: str) -> str:
        """Return the model's name of what is called ``name`` here."""
        index, _, rest = name.partition(".")
        block = self[int(index)]
        if isinstance(block, TracedStage):  # its model is no sequence
            return block.full_name(rest)
        return f"{self.first + int(index)}.{rest}"


def blocks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of an ``nn.Sequential``, or of a list of modules.

    Raises:
        TypeError: it is neither.
        ValueError: it is empty.
    """
    if isinstance(model, nn.Module) and not isinstance(model, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            "model: expected an nn.Sequential or a list of modules, got a "
            f"{type(model).__name__}; a model of any other form is cut at split_points"
        )
    blocks = list(model)
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise TypeError(f"model[{index}]: expected an nn.Module, got {type(block).__name__}")
    if not blocks:
        raise ValueError("model: expected at least one block, got none")
    return blocks


def cut_at(model: nn.Module | Sequence[nn.Module], ends: Sequence[int]) -> list[nn.Module]:
    """Cut a model by hand: stage k ends before block ``ends[k]``.

    Args:
        model: an ``nn.Sequential`` or a list of modules.
        ends: ascending; the last one is the number of blocks.

    Returns:
        A ``Slice`` per stage; they hold the model's own blocks.

    Raises:
        TypeError: the model has another form.
        ValueError: ``ends`` that leave a stage empty or a block out, or that separate blocks which
            share something.
    """
    blocks = blocks_of(model)
    starts = [0, *ends[:-1]]
    ascending = all(start < end for start, end in zip(starts, ends, strict=False))
    if not ends or not ascending or ends[-1] != len(blocks):
        raise ValueError(
            f"ends: expected ascending numbers, the last of them {len(blocks)} (the blocks), got "
            f"{list(ends)}"
        )
    for tie in ties_of(blocks):
        for end in ends[:-1]:
            if tie.first < end <= tie.last:
                raise ValueError(f"ends: a cut before block {end} separates {tie.what}")
    return [Slice(blocks[s:e], s) for s, e in zip(starts, ends, strict=True)]


def ties_of(blocks: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find what several blocks share: modules, parameters and module buffers."""
    owners: dict[object, tuple[int, str]] = {}
    ties: dict[tuple[int, int], Tie] = {}
    for index, block in enumerate(blocks):
        for part, name, kind in _parts(block):
            first, its_name = owners.setdefault(part, (index, name))
            if first != index and (first, index) not in ties:
                what = f"{kind} {_dotted(first, its_name)!r}, which is {_dotted(index, name)!r} too"
                ties[first, index] = Tie(first, index, what)
    return tuple(ties.values())


def _parts(block: nn.Module) -> Iterable[tuple[object, str, str]]:
    for name, parameter in block.named_parameters():
        yield parameter, name, "parameter"
    for name, buffer in block.named_buffers():
        yield buffer, name, "buffer"
    for name, module in block.named_modules():
        yield module, name, "module"


def _dotted(index: int, name: str) -> str:
    return f"{index}.{name}" if name else str(index)
