"""A pass that packs activations and gradients with a codec before they cross an edge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, reduce
from itertools import count
from typing import Any

import torch
from torch import Tensor

from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.tape import Entry
from spectrain_ext.pipeline.views import RunView
from spectrain_ext.rng import mixed_seed
from spectrain_ext.schedule import Kind
from spectrain_ext.transport.message import FLAT, TENSOR, Message, dense_strides, map_tensors

from .codecs import Codec, Codecs, codecs_of, is_coded

# Marks the form of a message with packed tensors; a note of what each was comes next.
_CODED = "coded"
#: Shape, strides and dtype of each packed tensor.
_Looks = tuple[tuple[Any, ...] | None, ...]


class Compress(Pass):
    """Packs what stages send one another, in one process too: see ``st.codecs``.

    Args:
        codec: for activations and gradients; or a pair, for activations and for gradients, of which
            one may be None.

    Raises:
        TypeError: what is not a codec.

    Example:
        >>> sgd = lambda params: st.optim.SGD(params, lr=0.1)
        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
        >>> passes = [st.passes.Compress(st.codecs.Int8())]
        >>> pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, passes=passes)
        >>> len(pipe.fit([(torch.ones(4, 2), torch.ones(4, 1))]))
        1
        >>> pipe.release()
    """

    def __init__(self, codec: Codec | tuple[Codec | None, Codec | None]) -> None:
        self._codecs: Codecs = codecs_of(codec)

    def __repr__(self) -> str:
        return f"Compress({', '.join(map(_described, self._codecs))})"

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        self._run = run
        return {}

    def sends_activation(self, i: int, j: int, message: Message) -> Message:
        return self._packed(i, j, message, False)

    def received_activation(self, i: int, j: int, message: Message) -> Message:
        return self._unpacked(message, False)

    def sends_gradient(self, i: int, j: int, message: Message) -> Message:
        return self._packed(i, j, message, True)

    def received_gradient(self, i: int, j: int, message: Message) -> Message:
        return self._unpacked(message, True)

    def crosses(self, value: Any) -> Any:
        codec, k = self._codecs[0], self.stage.index
        return value if codec is None or not k else crossed(codec, value, False, False, k - 1, 0, 0)

    def _packed(self, i: int, j: int, message: Message, backward: bool) -> Message:
        codec, run = self._codecs[backward], self._run
        if codec is None:
            return message
        where = backward, run.trains, self.stage.index
        microbatch = run.microbatch_of(j)
        return packed_message(codec, message, backward, *where, run.number_of(i), microbatch)

    def _unpacked(self, message: Message, backward: bool) -> Message:
        codec = self._codecs[backward]
        return message if codec is None else unpacked_message(codec, message, backward)


def _described(codec: Codec | None) -> str:
    """Describe a codec by text that is the same on all ranks with the same codec."""
    kind = type(codec)
    plain = kind.__repr__ is object.__repr__  # which contains an address
    return f"{kind.__module__}.{kind.__qualname__}" if plain else repr(codec)


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
    form = message.form or ("list", *[TENSOR] * len(tensors))
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
    plain = backward and form[0] == "list"
    return Message(tuple(tensors), message.differentiable, FLAT if plain else form)


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

    return map_tensors(value, cross)


def _packed(codec: Any, tensor: Tensor, backward: bool, key: tuple[int, ...]) -> Tensor:
    own = [reduce(mixed_seed, key, 0)] if getattr(codec, "draws", False) else ()
    packed = codec.pack(tensor, backward, *own)
    if not isinstance(packed, Tensor):
        raise TypeError(f"codec: expected a tensor of {codec!r}, got a {type(packed).__name__}")
    if packed.device != tensor.device:
        raise ValueError(f"codec: expected a tensor on {tensor.device}, got {packed.device}")
    return packed


def _unpacked(codec: Codec, packed: Tensor, like: Tensor, backward: bool) -> Tensor:
    tensor = codec.unpack(packed, like, backward)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"codec: expected a tensor of {codec!r}, got a {type(tensor).__name__}")
    if _description(tensor, tensor.device) != _description(like, packed.device):
        raise ValueError(
            f"codec: expected {_description(like, packed.device)} of {codec!r}, got "
            f"{_description(tensor, tensor.device)}"
        )
    return tensor


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
