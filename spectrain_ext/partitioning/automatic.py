"""Automatic: where a model of any form can be cut, found out by calling and tracing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from spectrain_ext.transport import Value

from .plan import evaluated
from .profile import Tie
from .traced import split

_OUT = (
    "name submodules to cut before (split_points), or give a list of blocks with before= and after="
)


class Automatic:
    """A model that is cut before submodules that it calls once.

    These are the innermost with parameters of their own; where torch.export or what is passed
    between them does not allow that, modules around them.

    Args:
        model: any that torch.export can trace.
        example: a microbatch.
        n_stages: how many are needed.

    Attributes:
        blocks: what lies between all places to cut.
        narrow: ties that leave only places where one tensor passes.

    Raises:
        RuntimeError: it cannot be traced.
        ValueError: there are too few places.
    """

    def __init__(self, model: nn.Module, example: Value, n_stages: int) -> None:
        self._model = model
        self._example = example
        why: Exception | None = None
        most = 1
        for names in levels(model, example):
            if len(names) < n_stages:
                most = max(most, len(names))
                continue
            try:
                blocks = split(model, example, names[1:], once=True)
            except ValueError as error:  # something that cannot be passed on, say
                why = error
                continue
            except RuntimeError as error:
                raise RuntimeError(f"{error}; {_OUT}") from error
            if len(blocks) == len(names):
                self._names = names
                self.blocks: Sequence[nn.Module] = blocks
                self.narrow = tuple(
                    Tie(index - 1, index, f"{block.takes} tensors pass before block {index}")
                    for index, block in enumerate(blocks)
                    if index and block.takes > 1
                )
                return
        if why is not None:
            raise ValueError(f"model: {why}; {_OUT}") from why
        raise ValueError(f"n_stages: expected 1 to {most} (the blocks), got {n_stages}; {_OUT}")

    def stages(self, ends: Sequence[int]) -> list[nn.Module]:
        """Return the stages that end before these blocks, each traced as one."""
        return [*split(self._model, self._example, [self._names[end] for end in ends[:-1]])]


def levels(model: nn.Module, example: Value) -> Iterator[list[str]]:
    """Names of submodules that may begin a block, in the order of their calls: finest first."""
    calls: dict[nn.Module, int] = {}

    def called(module: nn.Module, *_: object) -> None:
        calls[module] = calls.get(module, 0) + 1

    handles = [module.register_forward_pre_hook(called) for module in model.modules()]
    try:
        with evaluated(model):
            arguments: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
            model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in model.named_modules() if name}
    once = {module for module, count in calls.items() if count == 1}
    inner = [names[m] for m in calls if m in once and m in names and m._parameters]
    depth = max((name.count(".") + 1 for name in inner), default=0)
    before: list[str] = []
    modules = dict(model.named_modules())
    for level in range(depth, 0, -1):
        around = dict.fromkeys(".".join(name.split(".")[:level]) for name in inner)
        # Where a module has others in it, these are where blocks begin.
        outer = {name for name in around if any(n.startswith(name + ".") for n in around)}
        found = [name for name in around if name not in outer and modules[name] in once]
        if found and found != before:
            yield found
        before = found
    yield [""]  # the whole model
