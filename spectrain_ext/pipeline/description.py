"""Describes a pipeline in a few lines, for people. Loaded by the first ``repr`` of one."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from torch import nn

from spectrain_ext.method import delay_under, in_words

from .names import full_names

_HEADING = ("stage", "device", "parameters", "window", "delay", "versions", "MiB", "modules")
_SHOWN = 8  # lines for stages, of which one stands for those in the middle


def described(pipe: Any) -> str:
    """Return what ``repr`` of a ``Pipeline`` shows; unlike other accesses it ends no run."""
    kind = type(pipe).__name__
    if "_wires" not in vars(pipe):
        return f"{kind}(its constructor has not ended)"
    stages, now, running = pipe._wires.stages, pipe._applied, pipe._trains_now
    head = [pipe._describe_stages()]
    if "rank" in vars(pipe):
        head.append(f"rank {pipe.rank} of {pipe.ranks}")
    head.append(f"minibatches: {pipe.minibatches + (pipe._training.begun if running else 0)}")
    head += ["in a run"] * running
    like = next((weights.optimizer for weights in pipe._trained), None)
    method = textwrap.wrap(in_words(now.method, now.places, like), 100)
    rows: list[tuple[str, ...]] = [_HEADING]
    for stage, place, memory in zip(stages, pipe.places, pipe.predicted_memory(), strict=True):
        size = sum(p.numel() for p in stage.module.parameters())
        late, mib = delay_under(now.method.schedule, place), f"{memory.weight_bytes / 2**20:.3g}"
        numbers = place.window, late, memory.versions, mib
        rows.append((*map(str, (stage.index, stage.device, f"{size:,}", *numbers)), _range(stage)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    if len(stages) > _SHOWN:
        table[1 + _SHOWN // 2 : -_SHOWN // 2 + 1] = [f"  ... {len(stages) - _SHOWN + 1} more"]
    passes = [f"passes: {pipe._passes}"] if pipe._passes else []
    return "\n".join([f"{kind}({', '.join(head)})", *method, *table, *passes])


def _range(stage: Any) -> str:
    """Return the model's names of a stage's first and last block with parameters, or its class."""
    module: nn.Module = stage.module
    names = [*full_names(module, [name for name, _ in module.named_parameters()], "").values()]
    owners = [name.rpartition(".")[0] for name in names[:1] + names[-1:]]
    blocks = [re.sub(r"(\.\d+)\..*", r"\1", owner) for owner in owners if owner]
    return " to ".join(dict.fromkeys(blocks)) or type(module).__name__
