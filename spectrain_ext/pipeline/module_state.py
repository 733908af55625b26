"""Keeps and restores a module's buffers and its training modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ModuleBuffers:
    """A copy of a module's buffers; an object that is not a module has none.

    Inside ``with``, the module has these copies, and a graph made there keeps them. At the end the
    module gets back the buffers that it had.
    """

    def __init__(self, module: object) -> None:
        modules = module.modules() if isinstance(module, nn.Module) else ()
        self._original = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
        tensors = {t for _, original in self._original for t in original.values() if t is not None}
        # Copy them all: ``.data`` and the kernels of torch's norms write unnoticed by autograd.
        self._kept = {tensor: tensor.detach().clone() for tensor in tensors}
        self._now: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        copies = {tensor: kept.clone() for tensor, kept in self._kept.items()}
        self._now = [dict(buffers) for buffers, _ in self._original]
        for buffers, original in self._original:
            for name, tensor in original.items():
                buffers[name] = None if tensor is None else copies[tensor]

    def __exit__(self, *raised: object) -> None:
        for (buffers, _), now in zip(self._original, self._now, strict=False):
            buffers.update(now)
        self._now = []  # so that a second call does nothing

    def restore(self) -> None:
        """Put the values back; call this when no graph needs the buffers any more."""
        for buffers, original in self._original:
            buffers.update(original)
        for tensor, value in self._kept.items():
            tensor.copy_(value)

    def restore_finite(self, later: Sequence[ModuleBuffers]) -> None:
        """Put back values that became non-finite, in ``later`` copies too; graphs stay valid."""
        for held, original in self._original:
            copies = [(c._kept, had) for c in later for other, had in c._original if other is held]
            for name, tensor in original.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                value = self._kept[tensor]
                others = (kept[t] for kept, had in copies if (t := had.get(name)) is not None)
                for now in (held[name], *others):
                    if now is not None and now.shape == value.shape:
                        lost = value.isfinite() & ~now.isfinite()
                        now.data.copy_(torch.where(lost, value, now))


class ModuleModes:
    """The training modes of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes = [(part, part.training) for part in module.modules()]
        self._switched = False

    def evaluate(self) -> None:
        if any(training for _, training in self._modes):
            self._module.eval()
            self._switched = True

    def restore(self) -> None:
        """Put every submodule back into its mode; may be repeated."""
        try:
            if self._switched and self._modes[0][1]:
                self._module.train()  # which may be overridden and do more
            self._switched = False
        finally:
            for part, training in self._modes:
                part.training = training


@contextmanager
def changing_modes(what: str) -> Iterator[None]:
    """Turn the error of a module that torch.export made into one that says what to do."""
    try:
        yield
    except NotImplementedError as error:
        raise RuntimeError(
            f"{what} cannot change between training and evaluation ({error}), as one of "
            "torch.export; give the module that was exported, which partition can trace"
        ) from error
