"""partition: a model cut into balanced stages, by measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from spectrain_ext.transport import Value

from .cut import Cut, StageCount, classic_window, cut
from .profile import Profile, measure
from .slices import blocks_of, cut_at, ties_of
from .traced import split

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint


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
        TypeError, ValueError: an argument that does not fit, a limit that cannot be kept, or tied
            weights that leave too few places to cut; the message names them.
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
        Profile(profile.blocks, profile.input_bytes, ties),
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
