"""Buffers: which dtype and layout a rule's state has, and how a foreign one is made to fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WEIGHT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_dtypes(where: str, weight: torch.dtype, state: torch.dtype | None) -> None:
    """Raise TypeError unless weights of this dtype can be trained with state of that one."""
    if weight not in WEIGHT_DTYPES:
        raise TypeError(f"{where} must be float32, float64, float16 or bfloat16, got {weight}")
    if state is not None and not allowed(weight, state):
        raise TypeError(
            f"{where} is {weight}: its momentum can be {weight}"
            f"{' or torch.float32' if weight.itemsize == 2 else ''}, got {state}"
        )


def allowed(weight: torch.dtype, state: torch.dtype) -> bool:
    """Tell whether the kernels take this pair of dtypes."""
    return state == weight or (state == torch.float32 and weight.itemsize == 2)


def loaded_dtype(
    weight: torch.dtype, saved: torch.dtype, wanted: torch.dtype | None
) -> torch.dtype:
    """Return the dtype a saved buffer gets: the one asked for, else a float32 one stays float32."""
    if wanted is not None and allowed(weight, wanted):
        return wanted
    return saved if allowed(weight, saved) else weight


def empty_like(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor with the shape, strides and device of ``weight``."""
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device)


def fits(weight: Tensor, buffer: Tensor) -> bool:
    """Tell whether the kernels can walk ``buffer`` beside ``weight`` as it is."""
    return (
        buffer.shape == weight.shape
        and buffer.stride() == weight.stride()
        and buffer.device == weight.device
        and buffer.layout == torch.strided
        and allowed(weight.dtype, buffer.dtype)
    )


def check_buffer(where: str, key: str, weight: Tensor, buffer: Any) -> None:
    """Raise unless ``buffer`` can be copied into a buffer of ``weight``."""
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{where}: {key} must be a tensor, got {type(buffer).__name__}")
    if buffer.shape != weight.shape:
        raise ValueError(
            f"{where}: {key} must have shape {tuple(weight.shape)}, got {tuple(buffer.shape)}"
        )


def converted(weight: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an independent copy of ``buffer`` with the layout and device of ``weight``."""
    return empty_like(weight, dtype).copy_(buffer.detach())


def check_scalar(where: str, key: str, value: Any) -> float:
    """Return a scalar of the state, which may be a number or a tensor on any device."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{where}: {key} must be one number, got {value!r}") from error
