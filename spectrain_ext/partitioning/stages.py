"""partition and cut_at: a model as stages, balanced by measurement or cut by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from spectrain_ext.transport import Value

from .blocks import blocks_of, found_in, named, shared_of, slices_of, ties_of
from .columns import BY_POSITION, Columns, columns_in
from .cut import Cut, HasDocument, PlannedCut, StageCount, classic_window, cut, planned_cut
from .decoders import Decoder
from .lineage import is_valueless, without_values
from .own_loss import OwnLoss, own_loss
from .plan import adapted, is_pretrained, outline, takes_ids
from .profile import Profile, Tie, agreed, counted, measure
from .traced import TracedStage, split

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint


def cut_at(model: nn.Module | Sequence[nn.Module], ends: Sequence[int]) -> list[nn.Module]:
    """Cut a model by hand: stage k ends before block ``ends[k]``.

    Args:
        model: an ``nn.Sequential`` or a list of modules.
        ends: ascending; the last one is the number of blocks.

    Returns:
        A ``Slice`` per stage; they hold the model's own blocks. Where several hold one parameter
        the later ones say so, see ``mark_ties``. All know their places, and pipelines refuse them
        in another order.

    Raises:
        TypeError: the model has another form.
        ValueError: ``ends`` that leave a stage empty or a block out, or that separate blocks which
            share a module or a module buffer.
    """
    named = blocks_of(model)
    blocks = list(named.values())
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
    stages = slices_of(named, ends)
    _mark(stages)
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


def _mark(stages: Sequence[Any]) -> None:
    """Note in every stage which one it is, of how many, and what the whole model has.

    Pipelines check the former by ``check_order``; ``materialize`` knows by the names what files may
    have, and by which others a tied parameter may be stored, its home's first.
    """
    mark_ties(stages)
    tied: dict[nn.Parameter, list[str]] = {}
    everything: set[str] = set()
    for k, stage in enumerate(stages):
        stage.cut_place = (k, len(stages))
        for name, p in stage.named_parameters(remove_duplicate=False):
            tied.setdefault(p, []).append(stage.full_name(name))
        buffers = stage.named_buffers(remove_duplicate=False)
        everything.update(stage.full_name(name) for name, _ in buffers)
    names = frozenset(everything.union(*tied.values()))
    for stage in stages:
        stage.cut_names = names
        own = stage.named_parameters(remove_duplicate=False)
        stage.tied_names = {name: tied[p] for name, p in own if len(tied[p]) > 1}


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a model; iterating gives them, so that ``Pipeline`` takes it as it is.

    Attributes:
        stages: modules that hold the model's own parameters.
        cut: where the cuts are, with an estimate per stage. ``print(cut)`` shows a table.
        profile: what the cuts were decided by.
        settings: what a ``plan`` says of training, for ``Pipeline(parts, ..., **parts.settings)``:
            method, microbatches, window and, for a ``DistributedPipeline`` only, the replicas of
            every stage. Empty without a plan.
    """

    stages: list[nn.Module]
    cut: Cut
    profile: Profile
    _loss: OwnLoss | str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _mark(self.stages)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def loss_fn(self) -> OwnLoss:
        """Of a Hugging Face model: ``(output, batch) -> loss``, what it computes from ``labels``.

        The batch is a mapping that has the labels, or these themselves.

        Raises:
            ValueError: the model has none, or one that needs more than its output and labels.
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
    split_points: Mapping[str, SplitPoint] | Sequence[str] | None = None,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    profile: Profile | Literal["parameters"] | None = None,
    repeats: int = 5,
    speeds: Sequence[float] | None = None,
    bandwidth: float | Sequence[float] | None = None,
    memory_limit: int | Sequence[int] | None = None,
    weight_copies: int | StageCount = 4,
    window: int | StageCount = classic_window,
) -> Partition:
    """Cut a model into stages whose slowest one is as fast as possible.

    Stages may have parameters in common (tied weights): pipelines train these as one.

    Args:
        model: one of

            - a Hugging Face model around a list of blocks, as decoders are, or a ``PeftModel`` of
              one: it is cut between them, and what comes before and after the list counts as a
              block each;
            - an ``nn.Sequential`` or a list of modules, to be cut between its blocks;
            - any other module that torch.export can trace: in training and in evaluation, so that
              the stages have both modes; one that they cannot have is an error when ``train`` or
              ``eval`` asks for it. It is cut before submodules with parameters of their own, unless
              ``split_points`` names others.
        n_stages: how many stages, at least 1; with a ``plan`` it may be missing.
        example_input: a microbatch as the model takes it, on the model's device: a tensor, a tuple
            of tensors, or a mapping of names to columns. A list's first block takes the mapping.
            Other models are called with those columns as keyword arguments that their ``forward``
            has parameters for, as by ``forward(**batch)``; where these do not do, and one argument
            does, with a dict of all tensors. For Hugging Face's decoders it may be missing: token
            ids of one sequence are made up; and for a list of blocks with a plan, or on the meta
            device, where they then count by parameters.
        plan: cut where ``spectrain plan`` says, without measuring: the file that it has written,
            its content, or the ``Plan`` of ``spectrain_ext.planning``. It has to be of a model with
            the same names of blocks. ``settings`` of the result say how it trains.
        columns: names of columns to keep for the loss. Where a model is called by keywords, a
            batch's columns are dropped, as by transformers' ``Trainer``, unless they are parameters
            of ``forward`` or called ``label``, ``labels`` or ``label_ids``; where it takes a dict,
            unless they are in the example or called so.
        split_points: names of submodules to cut before, or name -> ``SplitPoint``. There must be
            ``n_stages - 1`` of them, or more: they are then candidates, and the best are used.
        before, after: run before the first of a list of blocks, and after the last one: modules,
            or functions without parameters. They count as blocks.
        profile: use this one instead of measuring; of the blocks, or of what lies between all the
            split points. ``"parameters"``: count a block's parameters, without those of embeddings:
            the same everywhere, where each process cuts the model for itself.
        repeats: timed runs of each block.
        speeds: per stage, how many times as fast as where it is measured it will compute, so that
            slower devices get less; None: all alike.
        bandwidth: bytes per second between neighbouring stages, or one number for each boundary
            between two; None: transfers are free.
        memory_limit: bytes that a stage may take, or one number per stage.
        weight_copies: copies of the parameters that a stage holds, see ``cut``.
        window: microbatches that a stage has in flight, see ``cut``.

    Returns:
        The stages with a report. Measured times differ from run to run, and so may the cuts; the
        same profile always gives the same ones. Where there is a process group and neither a
        ``profile`` nor a ``plan`` is given, rank 0's measurements are everybody's: all ranks call
        this, and cut alike.

    Raises:
        TypeError, ValueError: an argument that does not fit, a column that ``forward`` needs and
            the example has not, a limit that cannot be kept, or shared modules that leave too few
            places to cut; the message names them. The stages of a Hugging Face model do not compute
            what it does, in evaluation on the example.
        RuntimeError: torch.export cannot trace the model in the mode that it is in.

    A model on the meta device is cut without values: blocks count by operations, see ``measure``,
    and ``materialize`` gives each stage its values afterwards.

    Stages know the model's names of their parameters; those of a list with ``before`` or ``after``
    are ``before.*``, ``blocks.0.*``, ..., ``after.*``.

    Of a traced model everything but the mode, sizes, devices and whether gradients are enabled is
    what it was at that time: what a module's attributes (a dropout's ``p``) or a parameter's
    ``requires_grad`` led its code to do. A stage that is used with sizes or dtypes for which its
    code would have done something else raises ValueError or TypeError.
    """
    planned = None if plan is None else planned_cut(plan)
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
    more = tuple(columns)
    source = _source(model, n_stages, example_input, split_points, before, after, more, planned)
    blocks = source.blocks
    if planned is not None:
        planned.check(source.names, n_stages)
    _check_stages(n_stages, len(blocks))
    ties = ties_of(blocks)
    if profile == "parameters":
        profile = source.named(counted(blocks, ties))
    elif profile is None and planned is not None:
        profile = Profile(planned.blocks, ties)
    elif profile is None:
        profile = source.named(agreed(lambda: source.measure(repeats=repeats, ties=ties), blocks))
    elif len(profile.blocks) != len(blocks):
        raise ValueError(
            f"profile: expected {len(blocks)} blocks, as the model has, got {len(profile.blocks)}"
        )
    given = profile.blocks

    def best(ties: tuple[Tie, ...]) -> Cut:
        return cut(
            Profile(given, ties),
            n_stages,
            speeds=speeds,
            bandwidth=bandwidth,
            memory_limit=memory_limit,
            weight_copies=weight_copies,
            window=window,
        )

    found = best(ties if planned is None else planned.closed)
    if source.narrow and bandwidth is None:
        # What several tensors cost to pass on is not known: where they need not, they do not.
        with suppress(ValueError):
            narrow = best((*ties, *source.narrow))
            if narrow.slowest <= 1.25 * found.slowest:
                found = narrow
    stages = source.make(found.ends)
    if source.columns is not None:
        stages[0].batch_columns = source.columns  # type: ignore[assignment]
    if planned is None:
        return Partition(stages, found, profile, source.finish(stages))
    if shared := ties_of(stages, "stages"):
        raise ValueError(f"plan: it separates {shared[0].what}")
    return Partition(stages, found, profile, source.finish(stages), planned.settings)


def profile_of(
    model: nn.Module | Sequence[nn.Module],
    example_input: Value | None = None,
    *,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    repeats: int = 5,
) -> Profile:
    """Measure the blocks that ``partition`` cuts a model between, and what they share.

    Args:
        model: as for ``partition``.
        example_input, before, after: likewise.
        repeats: timed runs of each block.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``partition``.
    """
    source = _source(model, 1, example_input, None, before, after)
    measured = source.named(source.measure(repeats=repeats, ties=ties_of(source.blocks)))
    return replace(measured, shared=shared_of(source.blocks))


@dataclass(frozen=True)
class _Source:
    """A model that can be cut."""

    names: Sequence[str]  # of the blocks, as the model calls what each begins with
    blocks: Sequence[nn.Module]  # what lies between all places to cut
    make: Callable[[Sequence[int]], list[nn.Module]]  # the stages that end before these blocks
    measure: Callable[..., Profile]
    narrow: tuple[Tie, ...] = ()  # they leave only places where one tensor passes
    # Checks the stages, and finds the model's own loss, or why there is none.
    finish: Callable[[list[nn.Module]], OwnLoss | str] = lambda _: _NO_LOSS
    columns: Columns | None = None  # of a batch that is a mapping; None: nothing is dropped

    def named(self, profile: Profile) -> Profile:
        pairs = zip(profile.blocks, self.names, strict=True)
        return replace(profile, blocks=tuple(replace(block, name=name) for block, name in pairs))


_NO_LOSS = "the model has no loss of its own that is known; give a loss_fn"


def _source(
    model: nn.Module | Sequence[nn.Module],
    n_stages: int,
    example: Value | None,
    split_points: Mapping[str, SplitPoint] | Sequence[str] | None,
    before: Callable[[Any], Any] | None,
    after: Callable[[Any], Any] | None,
    more: tuple[str, ...] = (),
    planned: PlannedCut | None = None,
) -> _Source:
    listed = not isinstance(model, nn.Module) or isinstance(model, (nn.Sequential, nn.ModuleList))
    if not (before is None and after is None) and (not listed or split_points is not None):
        raise ValueError(
            f"before, after: for a list of blocks only, model is a {type(model).__name__}"
        )
    pretrained = is_pretrained(model)
    base = adapted(model)[0] if isinstance(model, nn.Module) else model
    if is_pretrained(base) and split_points is None and takes_ids(base):
        assert isinstance(model, nn.Module)
        decoder = Decoder(model, example, more)

        def finish(stages: list[nn.Module]) -> OwnLoss | str:
            decoder.check(stages)
            return own_loss(
                decoder.model, decoder.plan, decoder.example, decoder.output, decoder.lineage
            )

        return _Source(
            *(decoder.names, decoder.blocks, decoder.stages, decoder.measure),
            finish=finish,
            columns=decoder.plan.columns,
        )
    in_order = listed and split_points is None
    own = blocks_of(model, before, after) if in_order else {}
    parts = list(own.values())
    bare = example is None and in_order and is_valueless(*parts)
    if example is None and not bare and not (in_order and planned is not None):
        raise TypeError("example_input: expected a microbatch, got None")
    value: Value = () if example is None else example
    if in_order:
        if more:
            raise ValueError(
                "columns: of a list of blocks the first takes the whole batch, of which nothing is "
                f"dropped; got {list(more)}"
            )
        measured: Callable[..., Profile] = partial(measure, parts, value)
        if bare:

            def measured(repeats: int, ties: tuple[Tie, ...]) -> Profile:
                return counted(parts, ties)

        return _Source(list(own), parts, partial(slices_of, own), measured)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if is_valueless(model):
        value = example = without_values(example)
        for name, buffer in model.named_buffers():
            if not buffer.is_meta:
                raise ValueError(
                    f"model: buffer {name!r} is on {buffer.device}, and parameters on the meta "
                    "device; a model that is traced has to be there as a whole"
                )
    plan, output, taken = None, None, None
    if pretrained:
        plan, output = outline(model, example, more=more)
        taken = plan.columns.narrowed(example)
    elif isinstance(example, Mapping):
        taken = columns_in(model, example, more)
    call = BY_POSITION
    if taken is not None:
        value, call = tuple(taken.of(example).values()), taken.call
    narrow: tuple[Tie, ...] = ()
    blocks: Sequence[nn.Module]
    if split_points is None:
        wanted = None if planned is None else planned.names
        names, blocks = found_in(model, value, n_stages, call, wanted)
        narrow = tuple(
            Tie(index - 1, index, f"{block.takes} tensors pass before block {index}")
            for index, block in enumerate(blocks)
            if index and isinstance(block, TracedStage) and block.takes > 1
        )

        def make(ends: Sequence[int]) -> list[nn.Module]:
            points = [names[end] for end in ends[:-1]]
            return [*split(model, value, points, call=call)]  # each traced as one
    else:
        _check_stages(n_stages, len(split_points) + 1)
        names = [str(index) for index in range(len(split_points) + 1)]
        blocks = split(model, value, split_points, call=call)
        make = partial(slices_of, {str(index): block for index, block in enumerate(blocks)})

    def finish_traced(stages: list[nn.Module]) -> OwnLoss | str:
        first = next(m for m in stages[0].modules() if isinstance(m, TracedStage))
        first.columns = taken
        return _NO_LOSS if plan is None else own_loss(model, plan, example, output)

    measured = partial(measure, blocks, value)
    return _Source(named(names), blocks, make, measured, narrow, finish_traced, taken)


def _check_stages(n_stages: int, most: int) -> None:
    if not 1 <= n_stages <= most:
        raise ValueError(f"n_stages: expected 1 to {most} (the blocks), got {n_stages}")
