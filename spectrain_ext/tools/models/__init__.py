"""Cuts models that are no list of modules: Hugging Face's, and all that torch.export can trace.

model --> its form --> stages (--> values)
          Decoder                  materializing.py
          Traceable
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from spectrain_ext.partitioning import Form

from .decoders import Decoder
from .materializing import materialize, unexpected
from .outline import adapted, has_two_lists, is_pretrained
from .programs import TracedStage
from .traced import Traceable

__all__ = ["TracedStage", "form_of", "materialize", "unexpected"]

#: By classes of modules around others.
_WRAPPERS = {
    "OptimizedModule": "compiled by torch.compile; cut its _orig_mod, and compile the stages",
    "DistributedDataParallel": "wrapped in DistributedDataParallel; cut its .module, and give "
    "DistributedPipeline replicas=",
}


def form_of(
    model: object,
    n_stages: int,
    example: Any,
    split_points: Sequence[str] | None,
    kept: tuple[str, ...],  # columns for the loss
    names: Sequence[str] | None,  # of the blocks that a plan has
) -> Form:
    """Return the form of a model that is cut between its blocks, or traced."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    listed = isinstance(model, (nn.Sequential, nn.ModuleList))
    for name, module in () if listed else model.named_modules():
        if (why := _WRAPPERS.get(type(module).__name__)) is not None:
            raise TypeError(f"model: {f'its module {name!r}' if name else 'it'} is {why}")
    base, _ = adapted(model)
    takes_ids = getattr(base, "main_input_name", None) == "input_ids"
    if is_pretrained(base) and split_points is None and takes_ids and not has_two_lists(base):
        return Decoder(model, example, kept)
    if example is None:
        raise TypeError("example_input: expected a microbatch, got None")
    return Traceable(model, n_stages, example, split_points, kept, names)
