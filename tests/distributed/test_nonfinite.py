"""Tests losses and gradients that are not finite on one rank, which all ranks hear of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.nonfinite_programs import Passes, infinite, poisoned
from helpers.passes import with_passes
from helpers.rank_cases import same
from helpers.ranks import run_ranks
from helpers.replica_programs import make, sgd, stage_and_replica
from oracle.replicas import ReplicaOracle
from torch import Tensor, nn

import spectrain_ext as st

pytestmark = pytest.mark.processes

#: One rank's gradient overflows.
CASES: list[tuple[list[int], str, dict[str, Any]]] = [
    ([1, 1, 1], "auto", {"microbatches": 3}),
    ([1, 1, 1], "zb-h1", {"microbatches": 3, "clip_norm": 0.05}),
    ([2, 1], "vanilla", {"microbatches": 2}),
    ([1, 2], "spectrain", {"microbatches": 2}),
]
#: The bits of a run that never had the batches which are not finite.
LEFT_OUT: list[tuple[list[int], str, dict[str, Any]]] = [
    ([1, 2], "gpipe", {"microbatches": 2, "clip_norm": 0.05}),
    ([3], "1f1b", {"microbatches": 3, "averaging": st.averaging.Elastic(0.3)}),
]


def stages(n: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Passes("weight" if k == max(n - 2, 0) else None).double() for k in range(n)]


def batches(poison: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Return batches of which the third and fourth are poisoned or omitted."""
    g = torch.Generator().manual_seed(7)
    found = [tuple(torch.randn(2, 6, 5, generator=g).double()) for _ in range(8)]
    bad = [poisoned(found[2], "target", 1000.0), poisoned(found[3], "input", 100.0)]
    return [*found[:2], *(bad if poison else []), *found[4:]]


def train(rank: int, ranks: int) -> list[Any]:
    """Return this rank's losses, state, momentum and skipped updates of all trainings."""
    found = []
    for (counts, method, settings), poison in [
        *((case, True) for case in CASES),
        *((case, poison) for case in LEFT_OUT for poison in (True, False)),
    ]:
        part = stages(len(counts))[stage_and_replica(counts, rank)[0]]
        more = {"loss_fn": infinite, "on_nonfinite": "skip" if poison else None, **settings}
        pipe = make(rank, counts, method, part=part, **more)
        run = pipe.run(None if rank else batches(poison))
        losses = [result.loss.item() for result in run if result.has_loss]
        state = pipe.state_dict(), pipe.optimizers[0].state_dict()["state"]
        found.append((losses, *state, pipe.skipped))
    return found


def test_all_ranks_skip_what_is_not_finite_on_one() -> None:
    torch.set_num_threads(1)
    found = list(zip(*run_ranks(train, 3), strict=True))
    for (counts, method, settings), of_ranks in zip(CASES, found, strict=False):
        n, given = len(counts), {**settings, "on_nonfinite": "skip"}
        pipe = st.Pipeline(stages(n), sgd, infinite, method, **with_passes(given))
        losses = [result.loss.item() for result in pipe.run(batches())]
        expected = pipe.state_dict()
        if max(counts) > 1:  # replicas add in another order
            oracle = ReplicaOracle(stages(n), counts, of_torch, infinite, method, **given)
            oracle.run(batches())
            expected = nn.Sequential(*oracle.stages).state_dict()
        for rank, (its_losses, state, _, skipped) in enumerate(of_ranks):
            k, _ = stage_and_replica(counts, rank)
            assert skipped == (pipe.skipped[k],)
            assert pipe.skipped[k] > 0
            if max(counts) == 1:
                same(its_losses, losses if rank == 2 else [], method)
            exact = {"rtol": 0, "atol": 0} if max(counts) == 1 else {"rtol": 1e-9, "atol": 1e-12}
            own = {key: expected[key] for key in state}
            torch.testing.assert_close(state, own, **exact, msg=method)
    for n, (counts, method, _) in enumerate(LEFT_OUT):
        first = len(CASES) + 2 * n
        for (losses, *after, skipped), (expected, *clean, none) in zip(
            *found[first : first + 2], strict=True
        ):
            same(after, clean, f"{counts} {method}")
            assert losses[:2] + losses[4:] == expected
            assert (skipped, none) == ((2,), (0,))


def of_torch(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01)


def end(rank: int, ranks: int) -> list[tuple[str, str, str, bool]]:
    """Return the errors of runs in which only a stage's weight gradient is not finite."""
    found = []
    for method in ("1f1b", "auto"):
        part, data = stages(ranks)[rank], batches()
        more = {"part": part, "loss_fn": infinite, "on_nonfinite": "raise"}
        pipe = make(rank, [1] * ranks, method, **more)
        data[2] = data[0]
        with pytest.raises(RuntimeError) as caught:
            list(pipe.run(None if rank else data))
        finite = all(p.isfinite().all() for p in part.parameters())
        error = caught.value
        found.append((type(error).__name__, str(error), repr(error.__cause__), finite))
    return found


def test_all_ranks_end_by_the_first_that_is_not_finite() -> None:
    reason = "stage 1, minibatch 3, check for non-finite numbers: FloatingPointError: the gradient"
    cause = "FloatingPointError(\"the gradient of 'linear.weight' is not finite\")"
    for found in zip(*run_ranks(end, 3), strict=True):
        assert all(finite for *_, finite in found)
        kind, text, why, _ = found[1]
        assert (kind, why) == ("StageError", cause)
        assert text.startswith(reason)
        kind, text, *_ = found[2]
        assert kind == "RankError"
        assert re.search(f"first cause: rank [01], .*{reason[10:25]}", text)
