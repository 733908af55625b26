"""Parameters, gradients, settings and comparisons of the optimizer tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spectrain_ext as st

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F32, F64, BF16, F16)
# Over 20 steps: rounding once (here) against rounding after every operation (torch).
TOLERANCE = {
    F32: {"rtol": 2e-5, "atol": 2e-6},
    F64: {"rtol": 1e-12, "atol": 1e-13},
    BF16: {"rtol": 6e-2, "atol": 6e-2},
    F16: {"rtol": 8e-3, "atol": 8e-3},
}
ADAMS = ("Adam", "AdamW", "NAdam")
#: Of torch's optimizers that have a counterpart here: options with momentum.
OF_TORCH: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    **{name: {"lr": 0.02} for name in ADAMS},
}
#: In addition those that torch has not, or not so.
EVERY: dict[str, dict[str, Any]] = {
    **OF_TORCH,
    "Lion": {"lr": 0.02},
    "Muon": {"lr": 0.02, "adamw": {"lr": 0.01, "weight_decay": 0.05}},
    "SOAP": {"lr": 0.02, "eps": 1e-3},
}
every_adam = pytest.mark.parametrize("name", ADAMS)
every_rival = pytest.mark.parametrize("name", OF_TORCH)
every_optimizer = pytest.mark.parametrize("name", EVERY)


def make_params(dtype: torch.dtype = F64, device: str = "cpu") -> list[nn.Parameter]:
    """Return parameters of many layouts: scalar, empty, channels_last, transposed, odd sizes."""
    tensors = [
        torch.randn(7, 5, dtype=dtype),
        torch.randn((), dtype=dtype),
        torch.empty(0, 3, dtype=dtype),
        torch.randn(4, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 6, dtype=dtype).t(),
        torch.randn(1031, dtype=dtype),
    ]
    return [nn.Parameter(t.to(device)) for t in tensors]


def make_matrices(dtype: torch.dtype = F64) -> list[nn.Parameter]:
    """Return parameters of which Muon and SOAP update the first three by their own rules."""
    shapes = ((6, 6), (3, 8), (8, 3), (7,), (2, 3, 2))
    params = [nn.Parameter(torch.randn(shape, dtype=dtype) * 0.2) for shape in shapes]
    params[1] = nn.Parameter(params[1].detach().t().contiguous().t())  # with other strides
    return params


def twins(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def made(name: str, params: Any, **options: Any) -> Any:
    """Return one of the package's optimizers with the settings of these tests."""
    return getattr(st.optim, name)(params, **{**EVERY[name], **options})


def pair_of(
    name: str, params: Sequence[nn.Parameter], **options: Any
) -> tuple[list[nn.Parameter], Any, Any]:
    """Return copies of the parameters, our optimizer of these, and torch's of the copies."""
    theirs, options = twins(params), {**OF_TORCH[name], **options}
    return theirs, made(name, params, **options), getattr(torch.optim, name)(theirs, **options)


def give_gradients(*lists: Sequence[nn.Parameter], none: Sequence[int] = ()) -> None:
    """Give corresponding parameters of every list the same new random gradient, or None."""
    for row, same in enumerate(zip(*lists, strict=True)):
        grad = torch.randn_like(same[0]) * 0.3
        for p in same:
            p.grad = None if row in none else grad.clone()


def trained(
    name: str = "SGD", dtype: torch.dtype = F64, **options: Any
) -> tuple[list[nn.Parameter], Any]:
    """Return parameters and their optimizer after some steps."""
    params = make_params(dtype)
    optimizer = made(name, params, **options)
    for _ in range(3):
        give_gradients(params)
        optimizer.step()
    return params, optimizer


def law_of(steps: Any) -> Any:
    """Return the law that a number of steps means."""
    return steps if hasattr(type(steps), "sgd") else st.laws.Linear(steps)


def flat_views(
    params: Sequence[Tensor], dtype: torch.dtype | None = None, *, filled: bool = False
) -> dict[Tensor, Tensor]:
    """Return views of one buffer, in the parameters' layouts, with NaN between them.

    They contain NaN too, or the parameters' values if `filled`.
    """
    dtype, device = dtype or params[0].dtype, params[0].device
    starts = list(itertools.accumulate((p.numel() + 3 for p in params), initial=1))
    buffer = torch.full((starts[-1],), float("nan"), dtype=dtype, device=device)
    rows = zip(params, starts, strict=False)
    views = {p: buffer.as_strided(p.shape, p.stride(), start) for p, start in rows}
    for p, view in views.items() if filled else ():
        view.copy_(p.detach())
    return views


def buffers_for(
    optimizer: Any, dtype: torch.dtype | None = None
) -> dict[str, dict[Tensor, Tensor]]:
    """Return what ``bind`` needs for the optimizer's state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {key: flat_views(params, dtype) for key in optimizer.stepper.buffer_keys}


def state_of(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [dict(optimizer.state.get(p, {})) for p in params]


def values(state: Any) -> list[Tensor]:
    """Return all tensors in a list of dicts, or in a state_dict, copied."""
    entries = state["state"].values() if isinstance(state, dict) else state
    return bits(t for entry in entries for t in entry.values() if isinstance(t, Tensor))


def bits(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def assert_bits(tensors: Iterable[Tensor], kept: Iterable[Tensor]) -> None:
    for a, b in zip(tensors, kept, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.detach(), b.detach())


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.detach(), b.detach(), **TOLERANCE[a.dtype])


def refuses(
    call: Callable[[], Any], error: type[Exception], message: str, *kept: Iterable[Tensor]
) -> None:
    """Assert that a call raises, and that none of the tensors changes."""
    before = [bits(tensors) for tensors in kept]
    with pytest.raises(error, match=message):
        call()
    for tensors, old in zip(kept, before, strict=True):
        assert_bits(tensors, old)
