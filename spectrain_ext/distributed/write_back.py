"""Writes the weights of all ranks' stages into the uncut model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spectrain_ext.pipeline.loops import digest_of
from spectrain_ext.pipeline.names import same_memory, tensors_by_name

from .exchange import Peers

_WHAT = "comparing the weights"


class _Offer(NamedTuple):
    """A tensor that a rank can send, described by JSON types."""

    name: str
    shape: list[int]
    dtype: str
    digest: str  # of a tensor that does not train; a model with the same one needs no copy


def write_back(
    given: Mapping[str, Tensor],  # tensors that this rank sends to others
    own: Mapping[str, Tensor],  # all tensors of its stages
    model: nn.Module | None,
    peers: Peers,
) -> None:
    """Copy the tensors of all ranks into this rank's model, if it has one; all ranks call this."""
    offered: dict[str, tuple[int, _Offer]] = {}
    for rank, told in enumerate(peers.call_on_all(lambda: _offers(given), _WHAT)):
        for each in told:
            offered.setdefault(each[0], (rank, _Offer(*each)))
    places: dict[str, Tensor] = {}

    def wanted() -> list[str]:
        if model is None:
            return []
        shapes = {name: offer.shape for name, (_, offer) in offered.items()}
        places.update(tensors_by_name(model, shapes))
        return [n for n, (_, offer) in offered.items() if _wants(offer, places[n], own.get(n))]

    asked = [set(names) for names in peers.call_on_all(wanted, _WHAT)]
    for name, (rank, offer) in offered.items():
        if not any(name in names for names in asked):
            continue
        with peers.busy(f"giving {name!r}"):
            mine = given[name].detach().cpu() if rank == peers.rank else None
        found = peers.broadcast(rank, mine, offer.shape, getattr(torch, offer.dtype))
        if name in asked[peers.rank]:
            places[name].copy_(found)


def _offers(given: Mapping[str, Tensor]) -> list[_Offer]:
    return [
        _Offer(
            name,
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            "" if tensor.requires_grad else digest_of(tensor),
        )
        for name, tensor in given.items()
    ]


def _wants(offer: _Offer, place: Tensor, own: Tensor | None) -> bool:
    """Whether to write a model's tensor: it is not the stage's own, and may differ."""
    if own is not None and same_memory(own, place):
        return False
    return not offer.digest or digest_of(place) != offer.digest
