"""Tests random programs: saving, resuming and what else is done between runs change no bit.

``helpers.random_programs`` defines the program of a seed; a failure prints it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_cases import same, state_of
from helpers.random_programs import Program, seeds
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import load, save

# A stage whose input needs no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def script_of(program: Program) -> list[tuple[list[int], int | None, list[str]]]:
    """Return segments of a training: batch sizes, the result at which it is left, what follows."""
    pick = program.pick
    between = ["evaluate", "call", "weights", "rollback", "resume", "resume"]
    if not program.has_masters:  # it gives up their digits
        between.append("release")
    if not program.foreign or program.dtype == torch.float32 or program.has_masters:
        between.append("optimizers")  # torch's own would cast scalars to other dtypes
    found = []
    for _ in range(pick(2, 2, 3)):
        sizes = [pick(*program.sizes) for _ in range(pick(1, 2, 3, 5))]
        last = pick(None, program.draw.randrange(len(sizes)))
        found.append((sizes, last, [pick(*between) for _ in range(pick(0, 1, 2))]))
    found[0][2].append("resume")
    return found


def trained(program: Program, script: list[Any], path: Path | None) -> tuple[Any, ...]:
    """Return all losses and the final state; a ``path`` enables looks at the true weights."""
    losses = []
    torch.manual_seed(1)
    pipe = program.pipeline()
    for n, (sizes, last, between) in enumerate(script):
        run = pipe.run(program.batches(sizes, salt=n))
        for result in run:
            losses.append(result.loss)
            if path is not None:
                with pipe.weights():
                    copy.deepcopy(nn.ModuleList(pipe.children()))
            if result.index == last:
                break
        run.close()
        for k, what in enumerate(between if path is not None else ()):
            pipe = interrupted(program, pipe, what, path / f"{n}.{k}")
    return losses, state_of(pipe)


def interrupted(program: Program, pipe: st.Pipeline, what: str, path: Path) -> st.Pipeline:
    """Return the pipeline, or another one that continues its training."""
    extra = program.batches(program.sizes[:3], salt=77)
    if what == "evaluate":
        pipe.evaluate(extra)
    elif what == "call":
        (batch, *_) = extra
        pipe.eval()
        with torch.no_grad():
            pipe(batch if isinstance(batch, dict) else batch[0])
        pipe.train()
    elif what == "weights":
        pipe.load_state_dict({key: t.clone() for key, t in pipe.state_dict().items()})
    elif what == "optimizers":
        for optimizer in pipe.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
    elif what == "release":
        pipe.release()
    else:
        save(path, pipe)
        if what == "rollback":
            list(pipe.run(extra))
        else:
            torch.manual_seed(2)
            pipe = program.pipeline(salt=5)
        assert load(path, pipe).random
    return pipe


@pytest.mark.parametrize("seed", seeds(10))
def test_to_the_bit(seed: int, tmp_path: Path) -> None:
    program = Program(seed, "itself")
    script = script_of(program)
    print(program, script, sep="\n")
    same(trained(program, script, tmp_path), trained(program, script, None))
