"""Tests losses and gradients that are not finite, over processes and with replicas."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import nonfinite_programs
from helpers.nonfinite_programs import batches, infinite, stages_of, together
from helpers.ranks import run_ranks
from helpers.replica_programs import stage_and_replica
from oracle.replicas import ReplicaOracle

import spectrain_ext as st

pytestmark = pytest.mark.processes

CLIPPED = {"microbatches": 3, "clip_norm": 0.05}
#: The bits of a run that never had these batches.
EXACT = [
    ([1, 1, 1], "1f1b", {**CLIPPED, "codec": st.codecs.Int8()}),
    ([1, 2], "gpipe", {"microbatches": 2, "clip_norm": 0.05}),
    ([3], "1f1b", {"microbatches": 3, "averaging": st.averaging.Elastic(0.3)}),
]
#: The bits of the in-process pipeline.
ALIKE = [([1, 1, 1], "auto", {"microbatches": 3}), ([1, 1, 1], "zb-h1", CLIPPED)]
#: The result of the definition.
DEFINED = [([2, 1], "vanilla", {"microbatches": 2}), ([1, 2], "spectrain", {"microbatches": 2})]


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_what_is_left_out_over_processes_and_replicas():
    torch.set_num_threads(1)
    cases = [
        *((c, m, "everything", poison, more) for c, m, more in EXACT for poison in (True, False)),
        *((c, m, "passes", True, more) for c, m, more in (*ALIKE, *DEFINED)),
    ]
    ranks = run_ranks(nonfinite_programs.trained, 3, cases)
    for n, (counts, method, _) in enumerate(EXACT):
        for of_rank in ranks:
            losses, *poisoned, skipped = of_rank[2 * n]
            expected, *clean, none = of_rank[2 * n + 1]
            torch.testing.assert_close(poisoned, clean, rtol=0, atol=0, msg=f"{counts} {method}")
            assert losses[:2] + losses[4:] == expected
            assert (skipped, none) == ((2,), (0,))
    first = 2 * len(EXACT)
    for n, (_, method, settings) in enumerate(ALIKE, first):
        losses, state, skipped = together(3, method, "passes", True, settings)
        assert [str(loss) for loss in ranks[-1][n][0]] == [str(loss) for loss in losses]
        assert sum((rank[n][4] for rank in ranks), ()) == skipped
        for rank in ranks:
            for name, tensor in rank[n][1].items():
                assert torch.equal(tensor, state[name]), (method, name)
    for n, (counts, method, settings) in enumerate(DEFINED, first + len(ALIKE)):
        oracle = ReplicaOracle(
            *(stages_of("passes", len(counts)), counts, of_torch, infinite, method),
            **settings,
            on_nonfinite="skip",
        )
        oracle.run(batches("passes", poison=True))
        for rank, of_rank in enumerate(ranks):
            k, _ = stage_and_replica(counts, rank)
            for name, tensor in oracle.stages[k].state_dict().items():
                found = of_rank[n][1][f"{k}.{name}"]
                torch.testing.assert_close(found, tensor, rtol=1e-9, atol=1e-12, msg=method)
            assert of_rank[n][4] == (2,) if k == 0 else (1,)


def of_torch(params):
    return torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("method", ["1f1b", "auto"])
def test_all_ranks_end_by_the_first_that_is_not_finite(method):
    found = run_ranks(nonfinite_programs.raised, 3, method)
    reason = "stage 1, minibatch 3, check for non-finite numbers: FloatingPointError: the gradient"
    assert all(finite for *_, finite in found)
    kind, text, cause, _ = found[1]
    assert (kind, cause) == (
        "StageError",
        "FloatingPointError(\"the gradient of 'linear.weight' is not finite\")",
    )
    assert text.startswith(reason)
    kind, text, *_ = found[2]
    assert kind == "RankError" and re.search(f"first cause: rank [01], .*{reason[10:25]}", text)
