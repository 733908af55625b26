"""Packs messages with a codec before they cross an edge, and unpacks them afterwards."""

from __future__ import annotations

import json
from functools import lru_cache, reduce
from itertools import count
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.codecs import Codec, Codecs, is_coded
from spectrain_ext.rng import mixed_seed
from spectrain_ext.transport.message import FLAT, TENSOR, Message, dense_strides, each

from .tape import Entry

# Marks the form of a message with packed tensors; a note of what each was comes next.
_CODED = "coded"
#: Shape, strides and dtype of each packed tensor.
_Looks = tuple[tuple[Any, ...] | None, ...]


def in_words(codecs: Codecs) -> list[str]:
    """Describe the codecs by text that is the same on all ranks with the same codecs."""
    return [
        f"{type(one).__module__}.{type(one).__qualname__}"
        if type(one).__repr__ is object.__repr__
        else repr(one)
        for one in codecs
    ]


@torch.no_grad()
def packed_message(codec: Codec, message: Message, backward: bool, *key: int) -> Message:
    """Return the message as it crosses an edge; ``key``: numbers that no other message has."""
    tensors = message.tensors
    looks: _Looks = tuple(
        (t.shape, t.stride(), t.dtype) if t is not None and is_coded(t) else None for t in tensors
    )
    if not any(looks):
        return message
    packed = [
        tensor if look is None or tensor is None else _packed(codec, tensor, backward, (*key, n))
        for n, (tensor, look) in enumerate(zip(tensors, looks, strict=True))
    ]
    form = ("list", *[TENSOR] * len(tensors)) if backward else message.form
    return Message(tuple(packed), message.differentiable, (_CODED, _note(looks), form))


@torch.no_grad()
def unpacked_message(codec: Codec, message: Message, backward: bool) -> Message:
    """Return the message with its tensors unpacked; one without packed tensors is unchanged."""
    if not isinstance(message.form, tuple) or message.form[:1] != (_CODED,):
        return message
    _, note, form = message.form
    tensors = [
        tensor if like is None or tensor is None else _unpacked(codec, tensor, like, backward)
        for tensor, like in zip(message.tensors, _likes(note), strict=True)
    ]
    return Message(tuple(tensors), message.differentiable, FLAT if backward else form)


def crossed(codec: Codec, value: Any, *key: int) -> Any:
    """Return a value as the next stage gets it; gradients pass through unchanged."""
    places = count()

    def cross(tensor: Tensor) -> Tensor:
        n = next(places)
        if not is_coded(tensor):
            return tensor
        with torch.no_grad():
            packed = _packed(codec, tensor.detach(), False, (*key, n))
            like = torch.empty_like(tensor, device="meta")
            now = _unpacked(codec, packed, like, False)
        return Entry.apply(tensor, now)  # type: ignore[no-any-return, no-untyped-call]

    return each(value, cross)


def _packed(codec: Any, tensor: Tensor, backward: bool, key: tuple[int, ...]) -> Tensor:
    own = [reduce(mixed_seed, key, 0)] if getattr(codec, "draws", False) else ()
    packed = codec.pack(tensor, backward, *own)
    if not isinstance(packed, Tensor):
        raise TypeError(f"codec: expected a tensor of {codec!r}, got a {type(packed).__name__}")
    if packed.device != tensor.device:
        raise ValueError(f"codec: expected a tensor on {tensor.device}, got {packed.device}")
    return packed


def _unpacked(codec: Codec, packed: Tensor, like: Tensor, backward: bool) -> Tensor:
    found = codec.unpack(packed, like, backward)
    if not isinstance(found, Tensor):
        raise TypeError(f"codec: expected a tensor of {codec!r}, got a {type(found).__name__}")
    if _description(found, found.device) != _description(like, packed.device):
        raise ValueError(
            f"codec: expected {_description(like, packed.device)} of {codec!r}, got "
            f"{_description(found, found.device)}"
        )
    return found


def _description(tensor: Tensor, device: torch.device) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {device}".removeprefix("torch.")


# The note goes with the message's form, as a constant: it is sent once per form.


@lru_cache(maxsize=256)
def _note(looks: _Looks) -> str:
    whats: list[Any] = [None] * len(looks)
    for n, look in enumerate(looks):
        if look is not None:
            shape, stride, dtype = look
            dense = dense_strides(torch.empty_strided(shape, stride, device="meta"))
            whats[n] = str(dtype).removeprefix("torch."), shape, dense
    return json.dumps(json.dumps(whats))


@lru_cache(maxsize=256)
def _likes(note: str) -> list[Tensor | None]:
    whats = json.loads(json.loads(note))
    return [
        what and torch.empty_strided(what[1], what[2], dtype=getattr(torch, what[0]), device="meta")
        for what in whats
    ]
