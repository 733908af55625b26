"""Cuts a Hugging Face model between its blocks; each stage runs the model's own forward.

A stage is a copy of the model that shares its modules, with stand-ins for those of other stages. It
calls the model's ``forward``, so masks, positions and rotary embeddings are made as the model makes
them. The stage's first block gets the received hidden state instead of what the forward computed up
to there, and an exception leaves the forward after the last block. Stand-ins return NaN, so a model
that needs more from other stages than the hidden state produces NaN and is refused.

Only the first stage gets images. Stages of a mixture of experts hand on sums over its routers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spectrain_ext.cutting import Cut
from spectrain_ext.modules import is_valueless
from spectrain_ext.partitioning import BlockProfile, Profile, Tie, measure
from spectrain_ext.transport import Value, tensors_in

from .outline import (
    SPLIT_HINT,
    Inputs,
    Outline,
    adapted,
    copy_sharing,
    evaluated,
    find_outline,
    hidden_of,
    members_of,
    quoted,
)
from .own_loss import OwnLoss, balance_loss, own_loss, routed_sums, routers_of
from .stand_ins import StandIns, close, running


class _Inbox:
    """Holds a stage's received hidden state until its first block takes it."""

    hidden: Tensor | None = None  # set while the stage's forward runs
    taken = False
    logits: list[Tensor] | None = None  # of the stage's routers, while its forward runs

    def take(self) -> Tensor:
        assert self.hidden is not None
        self.taken = True
        return self.hidden


class _EndOfStage(BaseException):
    """Leaves a model's forward, with the hidden state, after the stage's last block."""


# Forwards of stand-ins, the valueless copies of other stages' modules


def _pass_hidden_on(
    inbox: _Inbox, members: int, enters: bool, leaves: bool, *args: Any, **kwargs: Any
) -> Any:
    """Pass the hidden state on as a block does that returns a tuple, or (0) a tensor."""
    hidden = hidden_of(args, kwargs)
    if leaves:
        raise _EndOfStage(hidden)
    if enters:
        hidden = inbox.take()
    return (hidden, *[None] * (members - 1)) if members else hidden


def _return_nan(inbox: _Inbox, shape: tuple[int, ...], *args: object, **kwargs: object) -> Tensor:
    """Return NaN in the place of what comes before the blocks, such as an embedding."""
    assert inbox.hidden is not None
    sizes = [size if size >= 0 else inbox.hidden.shape[~size] for size in shape]
    return inbox.hidden.new_full(sizes, torch.nan)


def _refuse(name: str, outline: Outline, *args: object, **kwargs: object) -> Any:
    why = "it left out a block where a stage ends (LayerDrop?), so that it cannot be cut there"
    if name in outline.only_first:
        why = "it comes before the blocks and returns something else than a tensor"
    elif not outline.side_modules[name].after:
        why = "the example_input did not need it; cut the model with one that has such columns"
    raise RuntimeError(f"the model's forward came to {name!r}, which another stage has; {why}")


def copy_without_values(module: nn.Module, top: bool = True) -> nn.Module:
    """Copy a module with all its attributes, but with tensors on the meta device."""
    # Tensors and inner modules become plain attributes, so that the stage does not own them.
    copied: nn.Module = object.__new__(type(module))
    tensors = {**module._parameters, **module._buffers}
    inner = {n: copy_without_values(m, False) for n, m in module._modules.items() if m is not None}
    held = vars(copied)
    held.update((n, v) for n, v in vars(module).items() if not isinstance(v, Tensor))
    held.update(vars(nn.Module()), training=module.training, gradient_checkpointing=False)
    for name, tensor in tensors.items():
        held[name] = tensor
        if tensor is not None:
            held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if top:
        held.update(inner)
    else:
        held["_modules"] = inner  # a ModuleList needs them
    return copied


class DecoderStage(nn.Module):
    """Blocks ``start`` to ``end`` of a model; block 0 precedes its list, the last one follows it.

    Gradient checkpointing (``gradient_checkpointing_enable``) stays as it was before the cut.
    """

    def __init__(
        self,
        model: nn.Module,
        outline: Outline,
        valueless: Mapping[str, nn.Module],
        start: int,
        end: int,  # after the last block
    ) -> None:
        super().__init__()
        self._outline = outline
        self._first = start == 0
        self._last = end == outline.blocks
        self._takes = 0 < start < end  # false for the first stage, and for one without blocks
        self._inbox = _Inbox()
        self._top_k = int(getattr(model, "num_experts_per_tok", 1))
        self.block_names: list[str] = []  # of the list's blocks in this stage
        self.model = copy_sharing(model, dict(self._stand_ins(model, valueless, start, end)))
        if not self._first:  # copies, because this stage may be on another device
            names = outline.path.split(".")
            for count in range(len(names)):
                around = self.model.get_submodule(".".join(names[:count]))
                vars(around)["_buffers"] = copy.deepcopy(around._buffers)
                tensors = {n: p for n, p in around._parameters.items() if p is not None}
                vars(around)["_parameters"] = {}  # the first stage has them
                vars(around).update((n, torch.full_like(p, torch.nan)) for n, p in tensors.items())
        self.training = model.training
        self.cut = Cut(prefixes={"model.": outline.prefix})

    def _stand_ins(
        self, model: nn.Module, valueless: Mapping[str, nn.Module], start: int, end: int
    ) -> Iterator[tuple[str, nn.Module]]:
        outline, inbox = self._outline, self._inbox

        def stand_in(name: str, forward: Callable[..., Any]) -> nn.Module:
            copied = copy_sharing(valueless[name], {})
            vars(copied)["forward"] = forward
            return copied

        for name, side_module in outline.side_modules.items():
            # A module without parameters may be on two stages; the first one owns it.
            after = side_module.after and (side_module.shape is not None or not side_module.before)
            if (self._first and side_module.before) or (self._last and after):
                continue
            only_first = name in outline.only_first
            if only_first or not (side_module.before or side_module.between):
                # The last stage keeps unused modules.
                if only_first or side_module.after or not self._last:
                    yield name, stand_in(name, partial(_refuse, name, outline))
            elif side_module.shape is not None:
                yield name, stand_in(name, partial(_return_nan, inbox, side_module.shape))
            elif not self._first:
                # A copy, because this stage may be on another device.
                module = model.get_submodule(name)
                is_dropout = isinstance(module, nn.Dropout)
                yield name, nn.Identity() if is_dropout else copy.deepcopy(module)
        count = len(outline.members)
        first, last = max(start - 1, 0), min(end - 1, count)
        blocks = list(members_of(model.get_submodule(outline.path)))
        for index, (module, members) in enumerate(zip(blocks, outline.members, strict=True)):
            name = f"{outline.path}.{index}"
            enters = not self._first and index == (first if first < last else count - 1)
            leaves = not self._last and index == (last - 1 if first < last else 0)
            if not first <= index < last:
                yield name, stand_in(name, partial(_pass_hidden_on, inbox, members, enters, leaves))
                continue
            self.block_names.append(f"model.{name}")
            routers: dict[str, nn.Module] = {}
            for full, output_index in outline.routers.items():
                if full.startswith(f"{name}."):
                    router = copy_sharing(model.get_submodule(full), {})
                    router.register_forward_hook(partial(_collect, inbox, output_index))
                    routers[full.removeprefix(f"{name}.")] = router
            if enters or leaves or routers:
                block = copy_sharing(module, routers)
                if enters:
                    block.register_forward_pre_hook(partial(_enter, inbox), with_kwargs=True)
                if leaves:
                    block.register_forward_hook(_leave)
                yield name, block

    def forward(self, value: Any) -> Any:
        """Return the hidden state with the batch's columns, or the output."""
        inbox, outline = self._inbox, self._outline
        hidden, sums, inputs = self._received(value)
        inbox.hidden, inbox.taken = hidden, not self._takes
        inbox.logits = logits = list[Tensor]()
        output = None
        try:
            output = self.model(**inputs, **outline.columns.fixed)
            left = self._last
        except _EndOfStage as leaving:
            (output,), left = leaving.args, True
        finally:
            inbox.hidden = inbox.logits = None
        if not inbox.taken or not left:
            raise RuntimeError(
                f"the model's forward left out a block of {outline.path!r} where a stage begins or "
                "ends (LayerDrop?), so that it cannot be cut there"
            )
        top_k, mask = self._top_k, inputs.get("attention_mask")
        sums += [routed_sums(each, top_k, mask) for each in logits]
        if not self._last:
            return self._packed(output, sums, inputs)
        if outline.routers:
            output["aux_loss"] = balance_loss(torch.stack(sums).sum(0), top_k)
        return output

    def _packed(self, hidden: Tensor, sums: list[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        names, empty = self._outline.travels, hidden.new_empty(0)
        count = max(i + 1 for i, name in enumerate(names) if name in inputs)
        # The empty tensor stands for a column that the batch lacks, and for no sums.
        rest = [inputs.get(name, empty) for name in names[:count]]
        if self._outline.routers:
            rest.insert(0, torch.stack(sums).sum(0) if sums else empty)
        return hidden, *rest

    def _received(self, value: Any) -> tuple[Tensor | None, list[Tensor], Inputs]:
        if self._first:
            return None, [], self._outline.columns.of(value)
        hidden, *rest = value
        count = min(1, len(self._outline.routers))
        pairs = zip(self._outline.travels, rest[count:], strict=False)
        sums = [each for each in rest[:count] if each.numel()]
        return hidden, sums, {name: tensor for name, tensor in pairs if tensor.numel()}


# Hooks of a stage's blocks


def _collect(inbox: _Inbox, index: int, _: nn.Module, args: object, output: Any) -> None:
    if inbox.logits is not None:  # else a checkpoint recomputes its block
        inbox.logits.append(output[index] if isinstance(output, tuple) else output)


def _enter(inbox: _Inbox, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (inbox.take(), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": inbox.take()}


def _leave(_: nn.Module, args: object, output: Any) -> Any:
    raise _EndOfStage(output[0] if isinstance(output, (tuple, list)) else output)


class Decoder:
    """A Hugging Face model to cut between its blocks, verified on an example."""

    narrow: tuple[Tie, ...] = ()

    def __init__(
        self, whole_model: nn.Module, example: Value | None, kept: tuple[str, ...]
    ) -> None:
        self.model, prefix = adapted(whole_model)
        model = self.model
        self.example: Any = example_of(model) if example is None else example
        self.stand_ins = StandIns() if is_valueless(model) else None
        if self.stand_ins is not None:
            self.example = self.stand_ins.of(self.example)
        with running(whole_model, self.stand_ins):
            outline, self.output = find_outline(model, self.example, kept, example is None)
            columns = outline.columns
            inputs = columns.of(self.example)
            if getattr(getattr(model, "config", None), "output_router_logits", False):
                outline = replace(outline, routers=routers_of(model, inputs, columns.fixed))
                # Stages make the loss of all routers, of which the model's code sees a few.
                columns = replace(columns, fixed={**columns.fixed, "output_router_logits": False})
            outline = self.outline = replace(outline, prefix=prefix, columns=columns)
            self.columns = columns
            self.value = tuple(inputs.values())
            self.run = partial(replace(self.columns, takes=tuple(inputs)).run, model)
            if whole_model is not model:
                routed = {"output_router_logits": True} if outline.routers else {}
                with evaluated(whole_model):
                    self.output = whole_model(**inputs, **{**columns.fixed, **routed})
        blocks = members_of(model.get_submodule(outline.path))
        named = {f"{outline.path}.{index}": block for index, block in enumerate(blocks)}
        named.update((name, model.get_submodule(name)) for name in outline.side_modules)
        self._valueless = {name: copy_without_values(module) for name, module in named.items()}
        try:
            self.blocks = self.stages(range(1, outline.blocks + 1))
            self.check(self.blocks)
        except Exception as error:
            beside = f"; only the first stage has {quoted(outline.only_first)}"
            beside *= bool(outline.only_first)
            raise ValueError(
                f"model: {type(model).__name__} cannot be cut between the blocks of "
                f"{outline.path!r}: {str(error) or repr(error)}{beside}; {SPLIT_HINT}"
            ) from error

    @property
    def names(self) -> list[str]:
        """Names of the blocks; those before and after the list by a module with parameters."""
        outline = self.outline
        sides = outline.side_modules.items()
        learn = [(n, side) for n, side in sides if [*self.model.get_submodule(n).parameters()]]
        first = next((name for name, side in learn if side.before), "before")
        last = next((name for name, side in learn if side.after and not side.before), "after")
        return [first, *(f"{outline.path}.{index}" for index in range(len(outline.members))), last]

    def stages(self, ends: Sequence[int]) -> list[nn.Module]:
        return [self._stage(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]

    def _stage(self, start: int, end: int) -> DecoderStage:
        return DecoderStage(self.model, self.outline, self._valueless, start, end)

    def loss_of(self, stages: Sequence[nn.Module]) -> OwnLoss | str:
        self.check(stages)
        return own_loss(self.model, self.columns, self.example, self.output, self.stand_ins)

    def check(self, stages: Sequence[nn.Module]) -> None:
        """Compare the stages' output with the model's; without values only its shapes."""
        every = nn.ModuleList([self.model, *stages])
        value: Any = self.example
        with evaluated(every), running(every, self.stand_ins):
            for stage in stages:
                value = stage(value)
        whole = self.output
        more = self.outline.images or self.outline.routers
        if more and isinstance(whole, Mapping):  # it may return their features or logits too
            whole = {name: whole[name] for name in value}
        outputs, wanted = list(tensors_in(value)), list(tensors_in(whole))
        if len(outputs) != len(wanted) or not all(
            a.shape == b.shape and (self.stand_ins is not None or close(a, b))
            for a, b in zip(outputs, wanted, strict=True)
        ):
            raise ValueError(
                "the stages do not compute what the model does, which has more between its stages "
                "than a hidden state"
            )

    def measure(self, repeats: int = 5) -> Profile:
        """Measure the blocks, minus the overhead of a stage around each of them."""
        inputs = self.columns.of(self.example)
        profile = measure(self.blocks, inputs, repeats=repeats)
        empty = self._stage(1, 1)
        around = measure([self.blocks[0], empty], inputs, repeats=repeats).blocks[1]

        def alone(index: int, block: BlockProfile) -> BlockProfile:
            more = around.parts if index else (0.0, 0.0)
            forward, backward = (max(0.0, b - m) for b, m in zip(block.parts, more, strict=True))
            return replace(block, seconds=forward + backward, forward_seconds=forward)

        return Profile(tuple(alone(*each) for each in enumerate(profile.blocks)))


def example_of(model: Any) -> Tensor:
    """Return token ids for a model's config: one sequence of at most 128."""
    config: Any = model.config.get_text_config(decoder=True)
    sizes = ("max_position_embeddings", "n_positions", "seq_length")
    lengths = [getattr(config, size, None) or -1 for size in sizes]
    most = min(size for size in (*lengths, 128) if size > 0)
    device = next(model.parameters()).device
    ids = torch.arange(1, most + 1, device=device).unsqueeze(0)
    return ids.remainder(int(config.vocab_size))
