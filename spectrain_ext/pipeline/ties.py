"""Finds parameters that several stages have; the first stage owns them, others get copies."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spectrain_ext.cutting import change_cut, cut_of
from spectrain_ext.transport.message import is_dense
from spectrain_ext.weights.storage import local_part

from .names import bare, found_as


@dataclass(eq=False)
class Copy:
    """A parameter of a stage that copies one of an earlier stage, its *home*.

    Only the home trains it: optimizer, clipping, predictions and masters are there.
    """

    stage: int
    module: nn.Module
    names: Sequence[str]
    home: int
    home_name: str  # the first, if it has several
    held: nn.Parameter  # the stage's parameter
    original: nn.Parameter | None  # the home's; None: it is in another process
    names_elsewhere: list[str] = field(default_factory=list)  # the home's, there in checkpoints
    _seen: int = -1  # the original's version number at the last copy

    def __post_init__(self) -> None:
        self._shared = self.held is self.original  # ``unbind`` restores that

    @property
    def member(self) -> Member:
        return Member(self.home, self.stage, self.home_name, self.names[0], self.held.requires_grad)

    def bind(self) -> None:
        if self.original is None or self.held is not self.original:
            return
        # Another pipeline made of these stages finds the tie by this.
        tied = {bare(name): (self.home, bare(self.home_name)) for name in self.names}
        ties = {**cut_of(self.module).ties, **tied}
        change_cut(self.module, f"stages[{self.stage}]", ties=ties)
        self.put(copy.deepcopy(self.original))
        self._seen = self.original._version

    def unbind(self) -> None:
        """Share one parameter again, if they did and are on one device."""
        original = self.original
        if self._shared and original is not None and self.held.device == original.device:
            self.put(original)

    def put(self, held: nn.Parameter) -> None:
        for name in self.names:
            path, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(path), leaf, held)
        self.held = held

    def follow(self, changed: bool = False) -> None:
        """Copy the home's value, between runs, if ``changed`` or if it was modified in place."""
        original = self.original
        if original is None or self.held is original:
            return
        if changed or self._seen != original._version:
            self.held.data.copy_(original.detach())
            self._seen = original._version


def copies_in(copies: Iterable[Copy], stage: int) -> dict[nn.Parameter, Copy]:
    return {copy.held: copy for copy in copies if copy.stage == stage}


class Member(NamedTuple):
    """One tied parameter: two stages, its name in each, and whether it gets a gradient."""

    home: int
    copy: int
    home_name: str
    name: str
    trained: bool

    def __str__(self) -> str:
        return (
            f"stages[{self.copy}]: parameter {self.name!r} is tied to {self.home_name!r} of "
            f"stages[{self.home}]"
        )


class TiedStages(NamedTuple):
    """All parameters of one stage that another has copies of."""

    home: int
    copy: int
    members: Sequence[Member]

    @property
    def trained(self) -> bool:
        return any(each.trained for each in self.members)


def ties_of(members: Iterable[Member]) -> list[TiedStages]:
    """Group tied parameters by their two stages, sorted by home, then by copy."""
    groups: dict[tuple[int, int], list[Member]] = {}
    for each in members:
        groups.setdefault((each.home, each.copy), []).append(each)
    return [TiedStages(*stages, groups[stages]) for stages in sorted(groups)]


def look_of(p: nn.Parameter) -> list[object]:
    """Return what a copy and its original must have in common, as JSON types."""
    placed = map(str, getattr(p, "placements", ()))  # of a DTensor
    return [list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, *placed]


def check_look(member: Member, look: Sequence[object], of_home: Sequence[object] | None) -> None:
    """Raise ValueError unless the home's parameter, None if there is none, is like the copy."""
    if of_home is None:
        raise ValueError(f"{member}, which there is not")
    if list(of_home) != list(look):
        raise ValueError(
            f"{member} and must be like it: shape, dtype and requires_grad are {list(look)} here "
            f"and {list(of_home)} there"
        )


def names_of(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names


def copies_of(modules: Sequence[nn.Module], indices: Sequence[int]) -> list[Copy]:
    """Find the copies in these stages: one object in several stages, or declared by attribute."""
    _check_memory(dict(zip(indices, modules, strict=True)))
    copies: list[Copy] = []
    owners: dict[nn.Parameter, tuple[int, str, nn.Parameter]] = {}  # of originals and copies
    here = dict(zip(indices, modules, strict=True))
    for k, module in here.items():
        declared = _declared_ties(module, k)
        for p, names in names_of(module).items():
            place = next((declared[name] for name in names if name in declared), None)
            home: tuple[int, str, nn.Parameter | None] | None = owners.get(p)
            if home is None and place is not None:
                home = (*place, None)
                if place[0] in here:
                    there = dict(here[place[0]].named_parameters(remove_duplicate=False))
                    name_there = found_as(place[1], there)
                    if name_there not in there:
                        check_look(Member(place[0], k, name_there, names[0], True), [], None)
                    home = owners[there[name_there]]
            if home is None:
                owners[p] = k, names[0], p
                continue
            home_index, home_name, original = home
            new = Copy(k, module, names, home_index, home_name, p, original)
            if original is None and any(each.held is p for each in copies):  # has its own versions
                new.put(copy.deepcopy(p))
            if original is not None:
                owners[p] = home_index, home_name, original
                check_look(new.member, look_of(p), look_of(original))
            copies.append(new)
    return copies


def _declared_ties(module: nn.Module, k: int) -> dict[str, tuple[int, str]]:
    """Return a stage's declared ties, by the names that its parameters have now."""
    declared = cut_of(module).ties
    if not isinstance(declared, Mapping):
        raise TypeError(
            f"stages[{k}].cut.ties: expected a mapping of names to (stage, name there), got "
            f"{type(declared).__name__}"
        )
    known = dict(module.named_parameters(remove_duplicate=False))
    ties = {}
    for name, place in declared.items():
        match place:
            case (int(home), str(name_there)) if 0 <= home < k:
                ties[found_as(name, known)] = home, name_there
            case _:
                raise ValueError(
                    f"stages[{k}].cut.ties[{name!r}]: expected (index of an earlier stage, name "
                    f"of its parameter), got {place!r}"
                )
    for name in ties:
        if name not in known:
            raise ValueError(f"stages[{k}].cut.ties: it has no parameter {name!r}")
    return ties


# Memory that a parameter shares with another tensor.


class _Span(NamedTuple):
    """The memory of a tensor, from its first element to its last one."""

    device: str
    begin: int  # address
    end: int
    tensor: Tensor
    trained: bool
    stage: int
    name: str  # with its kind


def _check_memory(modules: Mapping[int, nn.Module]) -> None:
    """Refuse trainable parameters whose memory another tensor of the stages has too."""
    before: list[_Span] = []
    for span in sorted(_spans(modules), key=lambda span: span[:3]):
        before = [each for each in before if each.device == span.device and each.end > span.begin]
        for other in before:
            if (span.trained or other.trained) and _overlap(span, other):
                first, second = sorted((other, span), key=lambda each: each.stage)
                raise ValueError(
                    f"stages[{second.stage}]: {second.name} has memory in common with "
                    f"{first.name} of stages[{first.stage}], and is another tensor: the pipeline "
                    "moves parameters to buffers of its own, and the two would no longer be one; "
                    "share the Parameter itself, as head.weight = embedding.weight does, or give "
                    "one of them a clone()"
                )
        before.append(span)


def _spans(modules: Mapping[int, nn.Module]) -> Iterator[_Span]:
    """Yield the memory of parameters, buffers and tensors in attributes, of each tensor once."""
    seen: set[Tensor] = set()
    parameters = {p for module in modules.values() for p in module.parameters()}
    for k, module in modules.items():
        named: list[tuple[str, str, Tensor]] = []
        named += [("parameter", *each) for each in module.named_parameters()]
        named += [("buffer", *each) for each in module.named_buffers()]
        for name, part in module.named_modules():
            if part._forward_pre_hooks:  # which may set them, as those of spectral_norm do
                continue
            for leaf, value in vars(part).items():
                where = f"{name}.{leaf}".removeprefix(".")
                for held in tree_leaves(value):
                    if isinstance(held, Tensor) and held not in parameters:
                        named.append(("attribute", where, held))
        for kind, name, tensor in named:
            local = local_part(tensor)
            if tensor in seen or not local.numel() or not is_dense(local):
                continue
            seen.add(tensor)
            begin = local.data_ptr()
            if begin:  # subclasses of quantized weights have none
                strides = zip(local.shape, local.stride(), strict=True)
                last = sum((size - 1) * stride for size, stride in strides)
                end = begin + (last + 1) * local.itemsize
                trained = kind == "parameter" and tensor.requires_grad
                where = f"{kind} {bare(name)!r}"
                yield _Span(str(local.device), begin, end, local, trained, k, where)


def _overlap(span: _Span, other: _Span) -> bool:
    """Whether two tensors have an element in common; columns of a matrix have none."""
    a, b, first = span.tensor, other.tensor, min(span.begin, other.begin)
    if a.dtype != b.dtype or (span.begin - other.begin) % a.itemsize:
        return True
    marks = torch.zeros((max(span.end, other.end) - first) // a.itemsize, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), (span.begin - first) // a.itemsize).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), (other.begin - first) // a.itemsize).any())
