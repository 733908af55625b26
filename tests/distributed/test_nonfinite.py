"""Tests losses and gradients that are not finite on one rank, which all ranks hear of."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.nonfinite_programs import batches, infinite, stages_of
from helpers.rank_cases import same
from helpers.ranks import run_ranks
from helpers.replica_programs import make, sgd, stage_and_replica
from oracle.replicas import ReplicaOracle

import spectrain_ext as st

pytestmark = pytest.mark.processes

CLIPPED = {"microbatches": 3, "clip_norm": 0.05}
#: One rank's gradient overflows.
CASES = [
    ([1, 1, 1], "auto", {"microbatches": 3}),
    ([1, 1, 1], "zb-h1", CLIPPED),
    ([2, 1], "vanilla", {"microbatches": 2}),
    ([1, 2], "spectrain", {"microbatches": 2}),
]
#: The bits of a run that never had the batches which are not finite.
LEFT_OUT = [
    ([1, 2], "gpipe", {"microbatches": 2, "clip_norm": 0.05}),
    ([3], "1f1b", {"microbatches": 3, "averaging": st.averaging.Elastic(0.3)}),
]


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(rank, ranks):
    """Return this rank's losses, state, momentum and skipped updates of all trainings."""
    torch.set_default_dtype(torch.float64)
    found = []
    for kind, chosen in (("passes", CASES), ("everything", LEFT_OUT)):
        for counts, method, settings in chosen:
            for poison in (True, False)[: 1 + (kind == "everything")]:
                part = stages_of(kind, len(counts))[stage_and_replica(counts, rank)[0]]
                torch.manual_seed(5)
                more = {"part": part, "loss_fn": infinite, **settings}
                more["on_nonfinite"] = "skip" if poison else None
                pipe = make(rank, counts, method, **more)
                run = pipe.run(None if rank else batches(kind, poison))
                losses = [result.loss.item() for result in run if result.has_loss]
                numbers = [each.states() for each in pipe.random]
                state = (pipe.state_dict(), pipe.optimizers[0].state_dict()["state"], numbers)
                found.append((losses, *state, pipe.skipped))
    return found


def test_all_ranks_skip_what_is_not_finite_on_one():
    torch.set_num_threads(1)
    found = list(zip(*run_ranks(train, 3), strict=True))
    for (counts, method, settings), of_ranks in zip(CASES, found, strict=False):
        parts = stages_of("passes", len(counts))
        torch.manual_seed(5)
        pipe = st.Pipeline(parts, sgd, infinite, method, on_nonfinite="skip", **settings)
        losses = [result.loss.item() for result in pipe.run(batches("passes", poison=True))]
        whole = pipe.state_dict()
        if max(counts) > 1:  # replicas add in another order
            given = (stages_of("passes", len(counts)), counts, of_torch, infinite, method)
            oracle = ReplicaOracle(*given, **settings, on_nonfinite="skip")
            oracle.run(batches("passes", poison=True))
            parts = [stage.state_dict() for stage in oracle.stages]
        for rank, (its_losses, state, *_, skipped) in enumerate(of_ranks):
            k, _ = stage_and_replica(counts, rank)
            assert skipped == (pipe.skipped[k],)
            assert pipe.skipped[k] > 0
            if max(counts) > 1:
                expected = {f"{k}.{name}": tensor for name, tensor in parts[k].items()}
                torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12, msg=method)
            else:
                same(state, {key: whole[key] for key in state}, method)
                same(its_losses, losses if rank == 2 else [], method)
    for n, (counts, method, _) in enumerate(LEFT_OUT):
        first = len(CASES) + 2 * n
        for (losses, *poisoned, skipped), (expected, *clean, none) in zip(
            *found[first : first + 2], strict=True
        ):
            same(poisoned, clean, f"{counts} {method}")
            assert losses[:2] + losses[4:] == expected
            assert (skipped, none) == ((2,), (0,))


def of_torch(params):
    return torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01)


def end(rank, ranks):
    """Return the errors of runs in which only a stage's weight gradient is not finite."""
    torch.set_default_dtype(torch.float64)
    found = []
    for method in ("1f1b", "auto"):
        part = stages_of("passes", ranks)[rank]
        more = {"part": part, "loss_fn": infinite, "on_nonfinite": "raise"}
        pipe = make(rank, [1] * ranks, method, **more)
        data = batches("passes", poison=True)
        data[2] = data[0]
        with pytest.raises(RuntimeError) as caught:
            list(pipe.run(None if rank else data))
        finite = all(p.isfinite().all() for p in part.parameters())
        error = caught.value
        found.append((type(error).__name__, str(error), repr(error.__cause__), finite))
    return found


def test_all_ranks_end_by_the_first_that_is_not_finite():
    reason = "stage 1, minibatch 3, check for non-finite numbers: FloatingPointError: the gradient"
    for found in zip(*run_ranks(end, 3), strict=True):
        assert all(finite for *_, finite in found)
        kind, text, cause, _ = found[1]
        assert (kind, cause) == (
            "StageError",
            "FloatingPointError(\"the gradient of 'linear.weight' is not finite\")",
        )
        assert text.startswith(reason)
        kind, text, *_ = found[2]
        assert kind == "RankError"
        assert re.search(f"first cause: rank [01], .*{reason[10:25]}", text)
