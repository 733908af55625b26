"""Cuts a model into stages, balanced by measurement or by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol

from torch import nn

from spectrain_ext.cutting import BatchColumns
from spectrain_ext.later import later
from spectrain_ext.transport.message import Value

from .blocks import BlockList, blocks_of, mark, slices_of, ties_of
from .cut import REMEDY, Division, check_ends, check_stages, cut
from .profile import Profile, Tie, measure_on_rank_0, profile_by_parameters, written_buffers


def cut_at(model: nn.Module | Sequence[nn.Module], ends: Sequence[int]) -> list[nn.Module]:
    """Cut a model by hand: stage k ends before block ``ends[k]``.

    Args:
        model: an ``nn.Sequential`` or a list of modules.
        ends: ascending block indices; the last is the number of blocks.

    Returns:
        Per stage an ``nn.Sequential`` of the model's own blocks, whose ``cut`` says what it knows
        of the model, see ``Cut``. Pipelines refuse the stages in another order.

    Raises:
        TypeError: the model is neither an ``nn.Sequential`` nor a list of modules.
        ValueError: ``ends`` leave a stage empty or a block out, or separate blocks that share a
            module or a module buffer.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> first, last = st.partitioning.cut_at(model, [2, 3])
        >>> list(last.state_dict()), last.cut.full_name("0.weight")
        (['0.weight', '0.bias'], '2.weight')
    """
    named = blocks_of(model)
    blocks = list(named.values())
    check_ends(ends, len(blocks))
    for tie in ties_of(blocks):
        for end in ends[:-1]:
            if tie.first < end <= tie.last:
                raise ValueError(f"ends: a cut before block {end} separates {tie.what}; {REMEDY}")
    stages = slices_of(named, ends)
    mark(stages, model)
    return stages


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a model; pass it to ``Pipeline`` as it is, or iterate over it.

    Attributes:
        stages: modules that hold the model's own parameters.
        cut: the cuts, with an estimate per stage; ``print(cut)`` shows a table.
        profile: the block costs that the cuts are based on.
        settings: a plan's keyword arguments for ``Pipeline(parts, ..., **parts.settings)``: method,
            microbatches, window and, for ``DistributedPipeline`` only, replicas per stage. Empty
            without a plan.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> parts = st.partition(model, 2, profile="parameters", example_input=torch.ones(4, 8))
        >>> len(parts), parts.cut.ends, parts.settings
        (2, (1, 3), {})
    """

    stages: list[nn.Module]
    cut: Division
    profile: Profile
    _loss: Callable[[Any, Any], Any] | str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __repr__(self) -> str:
        settings = f", settings={self.settings}" if self.settings else ""
        return f"Partition({len(self)} stages{settings})\n{self.cut}"

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """A Hugging Face model's own loss of ``(output, batch)``.

        The batch is a mapping with the model's labels, or the labels themselves.

        Raises:
            ValueError: the model has no loss, or its loss needs more than its output and labels.
        """
        if isinstance(self._loss, str):
            raise ValueError(f"loss_fn: {self._loss}")
        return self._loss


def partition(
    model: nn.Module | Sequence[nn.Module],
    n_stages: int | None = None,
    example_input: Value | None = None,
    *,
    plan: str | os.PathLike[str] | Mapping[str, Any] | HasDocument | None = None,
    columns: Sequence[str] = (),
    split_points: Sequence[str] | None = None,
    profile: Profile | Literal["parameters"] | None = None,
    speeds: Sequence[float] | None = None,
    bandwidth: float | Sequence[float] | None = None,
    memory_limit: int | Sequence[int] | None = None,
) -> Partition:
    """Cut a model into stages so that the slowest stage is as fast as possible.

    Stages may share parameters (tied weights); pipelines train these as one. Stages keep the
    model's parameter names. A model on the meta device, unless it is traced, is cut without values
    (see ``measure``), and ``materialize`` fills each stage afterwards.

    Args:
        model: one of

            - a Hugging Face model with a list of blocks, such as a decoder, or a ``PeftModel`` of
              one. It is cut between the blocks; the parts before and after the list count as one
              block each. An encoder of images is in the block before.
            - an ``nn.Sequential`` or a list of modules, cut between its blocks.
            - any other module that torch.export can trace. It is traced in training and in
              evaluation mode; if one fails, the stages' ``train`` or ``eval`` raises. It is cut
              before submodules with parameters of their own, or at ``split_points``.
        n_stages: number of stages, at least 1; may be omitted with a ``plan``.
        example_input: a microbatch on the model's device: a tensor, a tuple of tensors, or a
            mapping of names to columns. The first block of a list takes the mapping itself. Other
            models get the columns that ``forward`` has parameters for as keyword arguments, or, if
            that does not fit and one argument suffices, a dict of all tensors. May be omitted for
            Hugging Face decoders (one sequence of token ids is made up), and for a list of blocks
            with a plan or on the meta device (blocks then count by parameters).
        plan: use the cuts of ``spectrain plan`` instead of measuring: its file, the file's content,
            or a ``Plan`` of ``spectrain_ext.tools.planning``. The model's block names must match.
        columns: names of further columns to keep for the loss. For a model called with keywords,
            columns are dropped, as in transformers' ``Trainer``, unless ``forward`` has a parameter
            of that name or they are ``label``, ``labels`` or ``label_ids``. For a model that takes
            a dict, columns that are neither in the example nor labels are dropped.
        split_points: names of submodules to cut before. With more than ``n_stages - 1`` of them,
            the best are used.
        profile: used instead of measuring; it describes the blocks, or the parts between all split
            points. ``"parameters"`` counts a block's parameters, without embeddings, which gives
            the same cut in every process.
        speeds: per stage, how many times as fast as the measuring device it computes; None: 1.
        bandwidth: bytes per second between neighbouring stages, or one number per boundary; None:
            transfers cost nothing.
        memory_limit: bytes per stage, one number for all or one each; see ``cut``.

    Returns:
        The stages with their estimates. Measured times vary, and so may the cuts. In a process
        group, all ranks must call this: unless there is a ``profile`` or ``plan``, they all use
        rank 0's measurements.

    Raises:
        TypeError, ValueError: an argument that does not fit, a column missing in the example, a
            memory limit that cannot be met, or too few places to cut because of shared modules; the
            message names them. Also if the stages of a Hugging Face model do not reproduce its
            output on the example in evaluation mode.
        RuntimeError: torch.export cannot trace the model in its present mode.

    Tracing fixes what the model's code derived from module attributes (a dropout's ``p``) and from
    ``requires_grad``, and the dtypes that it names; only the mode, sizes and devices may change. A
    traced stage raises ValueError for sizes that its code would treat differently.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> parts = st.partition(model, 2, torch.ones(4, 8), profile="parameters")
        >>> [len(stage) for stage in parts]
        [1, 2]
    """
    planned = None if plan is None else later("planned_cut")(plan)
    if planned is not None and n_stages is None:
        n_stages = len(planned.ends)
    if isinstance(n_stages, bool) or not isinstance(n_stages, int):
        raise TypeError(f"n_stages: expected an int, got {type(n_stages).__name__}")
    if planned is not None and split_points is not None:
        raise ValueError("split_points: the plan has its own; give one of the two")
    if isinstance(profile, str) and profile != "parameters":
        raise ValueError(f"profile: expected a Profile or 'parameters', got {profile!r}")
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns: expected a sequence of names, got {columns!r}")
    source = _source(model, n_stages, example_input, split_points, tuple(columns), planned)
    blocks = source.blocks
    if planned is not None:
        planned.check(source.names, n_stages)
    check_stages(n_stages, len(blocks))
    ties = _ties(source, blocks) if planned is None else planned.closed
    if profile == "parameters":
        profile = profile_by_parameters(blocks)
    elif profile is None:
        known = planned and Profile(planned.blocks)
        profile = known or measure_on_rank_0(source.measure, blocks)
    elif len(profile.blocks) != len(blocks):
        raise ValueError(
            f"profile: expected {len(blocks)} blocks, as the model has, got {len(profile.blocks)}"
        )
    profile = replace(_with_names(profile, source.names), ties=ties)
    options: Any = {"speeds": speeds, "bandwidth": bandwidth, "memory_limit": memory_limit}
    best = cut(profile, n_stages, **options)
    if source.narrow and bandwidth is None:
        # Without a bandwidth the cost of several tensors at a cut is unknown: prefer cuts with one.
        with suppress(ValueError):
            narrow = cut(replace(profile, ties=(*ties, *source.narrow)), n_stages, **options)
            if narrow.slowest <= 1.25 * best.slowest:
                best = narrow
    stages = source.stages(best.ends)
    mark(stages, model, source.columns)
    if planned is not None and (shared := _ties(source, stages, "stages")):
        raise ValueError(f"plan: it separates {shared[0].what}; {REMEDY}")
    settings = {} if planned is None else planned.settings
    return Partition(stages, best, profile, source.loss_of(stages), settings)


def profile_of(
    model: nn.Module | Sequence[nn.Module],
    example_input: Value | None = None,
    *,
    repeats: int = 5,
) -> Profile:
    """Measure the blocks between which ``partition`` would cut a model."""
    source = _source(model, 1, example_input, None)
    measured = _with_names(source.measure(repeats), source.names)
    shared = ties_of(source.blocks, parameters=True)
    return replace(measured, ties=_ties(source, source.blocks), shared=shared)


class HasDocument(Protocol):
    """A plan of ``spectrain_ext.tools.planning``."""

    def document(self) -> Mapping[str, Any]:
        """Return the content of the plan's file."""


class Form(Protocol):
    """A form of model that can be cut."""

    @property
    def model(self) -> nn.Module:
        """The module that ``run`` runs."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the blocks."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The parts between which it can be cut."""

    @property
    def value(self) -> Any:
        """The example input, as ``run`` takes it."""

    @property
    def columns(self) -> BatchColumns | None:
        """The columns of a batch that is a mapping; None: all."""

    @property
    def narrow(self) -> tuple[Tie, ...]:
        """Ties that allow only cuts which a single tensor crosses."""

    @property
    def run(self) -> Callable[[Any], object]:
        """A function that runs ``model`` on a value."""

    def stages(self, ends: Sequence[int]) -> list[nn.Module]:
        """Return the stages that end before these blocks."""

    def measure(self, repeats: int = 5) -> Profile:
        """Return the costs of the blocks."""

    def loss_of(self, stages: Sequence[nn.Module]) -> Callable[[Any, Any], Any] | str:
        """Check stages, and return the model's own loss, or why there is none."""


def _ties(source: Form, parts: Sequence[nn.Module], kinds: str = "blocks") -> tuple[Tie, ...]:
    """Return what blocks or stages share and cannot have copies of."""
    # Takes two forwards, and is seldom needed.
    written = cache(lambda: written_buffers(source.model, source.run, source.value, parts))
    return ties_of(parts, kinds, lambda buffer: buffer not in written())


def _with_names(profile: Profile, names: Sequence[str]) -> Profile:
    pairs = zip(profile.blocks, names, strict=True)
    return replace(profile, blocks=tuple(replace(block, name=name) for block, name in pairs))


def _source(
    model: nn.Module | Sequence[nn.Module],
    n_stages: int,
    example: Value | None,
    split_points: Sequence[str] | None,
    kept: tuple[str, ...] = (),  # columns for the loss
    planned: Any = None,  # the cut of a plan
) -> Form:
    listed = not isinstance(model, nn.Module) or isinstance(model, (nn.Sequential, nn.ModuleList))
    if listed and split_points is None:
        return BlockList(blocks_of(model), example, kept, planned is not None)
    names = None if planned is None else planned.names
    form: Form = later("form_of")(model, n_stages, example, split_points, kept, names)
    return form
