"""partition and cut_at: a model as stages, balanced by measurement or cut by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from spectrain_ext.transport import Value

from .cut import Cut, StageCount, classic_window, cut
from .profile import Profile, Tie, measure
from .traced import TracedStage, split

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint


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
        A ``Slice`` per stage; they hold the model's own blocks. Where several hold one parameter
        the later ones say so, see ``mark_ties``.

    Raises:
        TypeError: the model has another form.
        ValueError: ``ends`` that leave a stage empty or a block out, or that separate blocks which
            share a module or a module buffer.
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
    stages: list[nn.Module] = [Slice(blocks[s:e], s) for s, e in zip(starts, ends, strict=True)]
    mark_ties(stages)
    return stages


def mark_ties(stages: Sequence[nn.Module]) -> None:
    """Note in later stages which of their parameters an earlier one has as well.

    ``stage.tied_parameters`` then maps their names to (the first stage that has the parameter, its
    name there). A ``DistributedPipeline``, which is given one stage of all, learns of ties from it;
    a ``Pipeline`` sees that the parameters are one.

    Args:
        stages: all stages of a model, in order.
    """
    homes: dict[nn.Parameter, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        named = list(stage.named_parameters(remove_duplicate=False))
        found = {name: homes[p] for name, p in named if p in homes}
        if found:
            stage.tied_parameters = found  # type: ignore[assignment]
        for name, p in named:
            homes.setdefault(p, (k, name))


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a model; iterating gives them, so that ``Pipeline`` takes it as it is.

    Attributes:
        stages: modules that hold the model's own parameters.
        cut: where the cuts are, with an estimate per stage. ``print(cut)`` shows a table.
        profile: what the cuts were decided by.
    """

    stages: list[nn.Module]
    cut: Cut
    profile: Profile

    def __post_init__(self) -> None:
        mark_ties(self.stages)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)


def partition(
    model: nn.Module | Sequence[nn.Module],
    n_stages: int,
    example_input: Value,
    *,
    split_points: Mapping[str, SplitPoint] | Sequence[str] | None = None,
    profile: Profile | None = None,
    repeats: int = 5,
    bandwidth: float | None = None,
    memory_limit: int | Sequence[int] | None = None,
    weight_copies: int | StageCount = 4,
    window: int | StageCount = classic_window,
) -> Partition:
    """Cut a model into stages whose slowest one is as fast as possible.

    Stages may have parameters in common (tied weights): pipelines train these as one.

    Args:
        model: an ``nn.Sequential`` or a list of modules, to be cut between its blocks. With
            ``split_points`` any module that torch.export can trace: in training and in evaluation,
            so that the stages have both modes; one that they cannot have is an error when ``train``
            or ``eval`` asks for it.
        n_stages: how many stages, at least 1.
        example_input: a microbatch as the model takes it, a tensor or a tuple of tensors, on the
            model's device.
        split_points: names of submodules to cut before, or name -> ``SplitPoint``. There must be
            ``n_stages - 1`` of them, or more: they are then candidates, and the best are used.
        profile: use this one instead of measuring; of the blocks, or of what lies between all the
            split points.
        repeats: timed runs of each block.
        bandwidth: bytes per second between neighbouring stages; None: transfers are free.
        memory_limit: bytes that a stage may take, or one number per stage.
        weight_copies: copies of the parameters that a stage holds, see ``cut``.
        window: microbatches that a stage has in flight, see ``cut``.

    Returns:
        The stages with a report. Measured times differ from run to run, and so may the cuts; the
        same profile always gives the same ones.

    Raises:
        TypeError, ValueError: an argument that does not fit, a limit that cannot be kept, or shared
            modules that leave too few places to cut; the message names them.
        RuntimeError: torch.export cannot trace the model in the mode that it is in.

    Of a traced model everything but the mode, sizes, devices and whether gradients are enabled is
    what it was at that time: what a module's attributes (a dropout's ``p``) or a parameter's
    ``requires_grad`` led its code to do. A stage that is used with sizes or dtypes for which its
    code would have done something else raises ValueError or TypeError.
    """
    if split_points is None:
        blocks = blocks_of(model)
        _check_stages(n_stages, len(blocks))
    else:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        _check_stages(n_stages, len(split_points) + 1)
        blocks = split(model, example_input, split_points)
    ties = ties_of(blocks)
    if profile is None:
        profile = measure(blocks, example_input, repeats=repeats, ties=ties)
    elif len(profile.blocks) != len(blocks):
        raise ValueError(
            f"profile: expected {len(blocks)} blocks, as the model has, got {len(profile.blocks)}"
        )
    found = cut(
        Profile(profile.blocks, ties),
        n_stages,
        bandwidth=bandwidth,
        memory_limit=memory_limit,
        weight_copies=weight_copies,
        window=window,
    )
    stages = cut_at(blocks, found.ends)
    return Partition(stages, found, profile)


def _check_stages(n_stages: int, most: int) -> None:
    if isinstance(n_stages, bool) or not isinstance(n_stages, int):
        raise TypeError(f"n_stages: expected an int, got {type(n_stages).__name__}")
    if not 1 <= n_stages <= most:
        raise ValueError(f"n_stages: expected 1 to {most} (the blocks), got {n_stages}")


def ties_of(blocks: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find what several blocks share and stages cannot: modules and module buffers.

    Parameters they can; those of a shared module are shared with it.
    """
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
    for name, buffer in block.named_buffers():
        yield buffer, name, "buffer"
    for name, module in block.named_modules():
        yield module, name, "module"


def _dotted(index: int, name: str) -> str:
    return f"{index}.{name}" if name else str(index)
