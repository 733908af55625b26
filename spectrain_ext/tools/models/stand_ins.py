"""Stands in for tensors on the meta device, so that models behave as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from spectrain_ext.modules import slots_of


def close(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape differ by rounding only, relative to the largest number."""
    # torch.testing's rtol, with an atol that allows for a GPU's order of summation.
    rtol = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-5
    return torch.allclose(a, b, rtol=rtol, atol=rtol * float(b.abs().max()) if b.numel() else 0.0)


class StandIns:
    """Tensors without values that appear to be on the CPU, for those of models on the meta device.

    A model behaves with them as it does there, but nothing is computed.
    """

    def __init__(self) -> None:
        from torch._subclasses import FakeTensorMode

        # transformers treats fake tensors as traced ones, and does not read their values.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: Any = WeakIdKeyDictionary()  # by the tensor that they stand in for

    def of(self, value: Any) -> Any:
        """Return stand-ins for the tensors of a value."""
        return tree_map_only(Tensor, self._of, value)

    def _of(self, tensor: Tensor) -> Tensor:
        if tensor not in self._made:
            size, stride = tensor.size(), tensor.stride()
            with self._mode:
                made = torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
            self._made[tensor] = made
        return self._made[tensor]  # type: ignore[no-any-return]

    @contextmanager
    def used(self, module: nn.Module) -> Iterator[None]:
        """Have the module's parameters and buffers replaced meanwhile."""
        slots = list(slots_of(module))
        try:
            for owner, key, _, tensor in slots:
                setattr(owner, key, self._of(tensor))
            with torch.device("cpu"), self._mode:
                yield
        finally:
            for owner, key, _, tensor in slots:
                setattr(owner, key, tensor)


@contextmanager
def running(module: nn.Module, stand_ins: StandIns | None) -> Iterator[None]:
    """Run a module inside this context, with its own tensors or with stand-ins for them."""
    if stand_ins is None:
        yield
    else:
        with stand_ins.used(module):
            yield
