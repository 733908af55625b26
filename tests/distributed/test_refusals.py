"""Tests what pipelines over ranks refuse: on all ranks, with one reason that names the argument."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.foreign_optimizers import ScheduleFree
from helpers.passes import with_passes
from helpers.ranks import run_ranks
from helpers.replica_programs import averaging, data, mse, sgd, stages
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spectrain_ext as st
from spectrain_ext.method import recipe_clip
from spectrain_ext.partitioning import Cut, cut_at

pytestmark = pytest.mark.processes


def make(rank, stage=None, optimizer=sgd, method="vanilla", **more):
    """Make a pipeline with this rank's stage, of four that all ranks know."""
    stage = stages(4)[rank] if stage is None else stage
    settings = with_passes({"timeout": 20.0, **more})
    return st.DistributedPipeline(stage, optimizer, mse, method, **settings)


def in_chunks(rank, parts=None, **more):
    return make(rank, stages(4)[rank::2] if parts is None else parts, **more)


def hidden(rank, whole, known):
    """Make a pipeline whose optimizer gets the matrices of ``known`` stages."""
    matrices = [p for part in known for p in part.parameters() if p.dim() == 2]
    return make(rank, whole[rank], partial(st.optim.Muon, hidden=matrices))


def of_a_cut(rank, method, *order):
    """Take every second stage of a cut, in this order."""
    parts = cut_at([nn.Linear(5, 5) for _ in order], range(1, len(order) + 1))
    return make(rank, [parts[k] for k in order[rank::2]], method=method)


def tied_to(rank, name, bias=True, **more):
    """Tie the weight of stage 1 to a parameter of stage 0."""
    stage = nn.Linear(5, 5, bias=bias)
    if rank == 1:
        stage.cut = Cut(ties={"weight": (0, name)})
    return make(rank, stage, **more)


def narrow_tie(rank):
    parts = stages(4)[rank::2]
    parts[1] = nn.Linear(2, 2)
    parts[1].cut = Cut(ties={"weight": (rank, "0.weight")})
    return make(rank, parts)


def replicas(rank, counts, by=None, **more):
    """Make a pipeline with replicas, of which one may differ in a weight."""
    torch.manual_seed(3)
    part = stages(2)[rank // 2]
    if rank == by:
        with torch.no_grad():
            part[0].bias[1] += 1e-9
    return make(rank, part, replicas=counts, **{"microbatches": 4, **more})


def averages(rank, counts=2, **more):
    given = {"averaging": st.averaging.Elastic(0.5), "optimizer": averaging, **more}
    return make(rank, stages(1)[0], replicas=counts, **{"microbatches": 4, **given})


def differ(build=make, **given):
    """Return a call whose arguments, two each, differ between the ranks."""
    return lambda rank: build(rank, **{name: pair[rank] for name, pair in given.items()})


def alike(build, *args, **given):
    return lambda rank: build(rank, *args, **given)


CLIPPED = {"clip_scope": "global", "clip_norm": 1.0}
CUT = "is tied to '{}' of stages[0], which there is not"
REPLICAS = "stage: the replicas of stage {} must start from the same weights and options; "
HORIZONS = [
    replace(st.spectrain(), forward_horizon=lambda place, rank=rank: place.stage + rank)
    for rank in (0, 1)
]
LAWS = [st.spectrain(law=law) for law in ("linear", "geometric")]
RATES = [st.hybrid("sync", st.pipemare(updates=n)) for n in (10, 11)]
CODECS = [st.codecs.Int8(block=n) for n in (64, 65)]
STRENGTHS = [st.averaging.Elastic(strength) for strength in (0.1, 0.2)]
#: Calls by number of ranks, and what an error says; nothing: there is none.
ROWS = {
    1: [(lambda r: in_chunks(r, stages(2)), "stage: got 2 for the only rank")],
    2: [
        (differ(method=("vanilla", "spectrain")), "method: rank 0 has 'vanilla' and rank 1 has 's"),
        (
            differ(method=HORIZONS),
            "method: forward_horizon of 'spectrain': rank 0 has [0, 1] and rank 1 has [1, 2]; all",
        ),
        (differ(method=LAWS), "law of 'spectrain': rank 0 has ['linear', 'linear']"),
        (differ(in_chunks, method=RATES), "method: rates of 'pipemare', phase 1: rank 0 has [0.33"),
        (
            differ(method=[replace(st.hybrid(after=n), name="hybrid") for n in (9, 10)]),
            "method: then of 'hybrid': rank 0 has [9] and rank 1 has [10]; all",
        ),
        (differ(method=[st.second_order(clip=c) for c in (recipe_clip, lambda _: 1)]), "[0.403"),
        (differ(microbatches=(1, 2)), "rank 0 has 1 and rank 1 has 2"),
        (differ(count=(len, None)), "count: rank 0 has 'given' and rank 1 has 'none'; all must"),
        (
            differ(codec=CODECS),
            "passes: rank 0 has '[Compress(Int8(block=64, ",
        ),
        (
            differ(optimizer=(sgd, lambda params: None)),
            "first cause: rank 1, meeting: TypeError: optimizer: for stages[1] it made a",
        ),
        (lambda r: hidden(r, stages(2), stages(2)), "stages train 0 of the 2 matrices in hidden"),
        (lambda r: hidden(r, whole := stages(2), whole), ""),
        (lambda r: make(r, stages(2)[r].requires_grad_(False)), "none has a trainable parameter"),
        (lambda r: make(r, stages(2)[r].requires_grad_(r == 0)), ""),
        (alike(make, timeout=0.0), "timeout: expected a positive number of seconds, got 0.0"),
        # Several stages on a rank
        (alike(in_chunks, replicas=2), "with 2 stages on every rank expected one of each, got 2"),
        (lambda r: in_chunks(r, stages(4)[r :: 2 + r]), "rank 1 has '1 stages' and rank 0 has '2"),
        (alike(in_chunks, []), "expected at least one module"),
        (lambda r: in_chunks(r, stages(1) * 2), "the very same module"),
        (lambda r: in_chunks(r, [*stages(1), nn.Linear(5, 5, device="meta")]), "meta"),
        (narrow_tie, "[[2, 2], 'float32', True]"),
        (alike(of_a_cut, "auto", 1, 0), "stages[0]: it is stage 1 of the 2"),
        (alike(of_a_cut, "interleaved", 0, 1, 3, 2), "stages[2]: it is stage 3 of the 4"),  # a V
        # Ties
        (alike(tied_to, "wait"), f"stages[1]: parameter 'weight' {CUT.format('wait')}"),
        (alike(tied_to, "bias", bias=False), CUT.format("bias")),
        (alike(tied_to, "bias"), "[[5, 5], 'float32', True] here and [[5], 'float32', True] there"),
        # Averaging
        (alike(averages, 1), "AverageWeights: needs the same number of replicas of every stage"),
        (alike(averages, method="sync", **CLIPPED), "AverageWeights: clip_scope='global'"),
        (
            alike(averages, optimizer=ScheduleFree),
            "AverageWeights: stages[0] has a ScheduleFree, whose train() and eval() change",
        ),
        (
            differ(averages, averaging=STRENGTHS),
            "passes: rank 0 has '[AverageWeights(averaging=E",
        ),
        (alike(averages, count=len), "count: with AverageWeights every replica has a minibatch"),
    ],
    4: [
        (alike(replicas, [2, 1]), "replicas: [2, 1] are 3 ranks in all, and there are 4"),
        (alike(replicas, 3), "replicas: 3 for every stage do not divide 4 ranks"),
        (alike(replicas, [4, 0]), "replicas[1]: expected at least 1, got 0"),
        (alike(replicas, "22"), "TypeError: replicas: expected a number, or one per stage"),
        (alike(replicas, [1, 3]), "replicas: stage 1 has 3, which must divide the 4 microbatches"),
        (
            alike(replicas, [1, 3], window=2, microbatches=3),
            "stage 1 of 2, 2 microbatches on each of its 3 replicas",
        ),
        (
            alike(replicas, [1, 3], method="pipedream-vertical-sync", microbatches=3),
            "expected the same number everywhere, got [1, 3]",
        ),
        (
            alike(replicas, [2, 2], method="dc-asgd"),
            "replicas: method 'dc-asgd' corrects gradients by the stale weights that "
            "they read, of which replicas have different ones, and would drift apart; expected one "
            "replica of stage 0, got 2",
        ),
        (
            lambda r: replicas(r, [[1, 3], [3, 1]][r % 2], microbatches=3),
            "replicas: rank 0 has [1, 3] and rank 1 has [3, 1]; all must have the same",
        ),
        (
            alike(replicas, [2, 2], by=3),
            REPLICAS.format(1) + "'0.bias' of rank 2 is not that of rank 3",
        ),
        (
            lambda r: replicas(r, [2, 2], optimizer=partial(st.optim.SGD, lr=(2 - (r > 0)) / 10)),
            REPLICAS.format(0) + "the optimizer's 'lr' of parameter group 0 is 0.2 on rank 0 and",
        ),
        (
            lambda r: replicas(r, [2, 2], recompute=r > 0),
            REPLICAS.format(0) + "the argument recompute is False on rank 0 and True on rank 1; g",
        ),
        (
            lambda r: make(r, group=[*map(dist.new_group, ([0, 1], [2, 3]))][1 - r // 2]),
            "group: this process is rank 0, and not one of its [2, 3]",
        ),
        (
            lambda r: tied_to(r // 2, "weight", replicas=[2, 2], microbatches=2),
            "tie_word_embeddings=False",
        ),
    ],
}


def errors_of(rank, ranks):
    """Return the error of every call, or nothing."""
    found = []
    for call, _ in ROWS[ranks]:
        try:
            call(rank)
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


OTHER_ORDER = r"(rank . has .*) and (rank . has .*?);", r"\2 and \1;"


@pytest.mark.parametrize("ranks", ROWS)
def test_what_is_refused_is_refused_on_all_ranks(ranks):
    found = zip(ROWS[ranks], *run_ranks(errors_of, ranks), strict=True)
    for n, ((_, expected), *errors) in enumerate(found):
        assert all(errors) if expected else not any(errors), (n, errors)
        # Either rank may be the first to compare, and the other one then repeats its error.
        swapped = [re.sub(*OTHER_ORDER, error) for error in errors]
        assert any(expected in error for error in (*errors, *swapped)), (n, errors)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        make(0)


# In a run and after it


def use_wrongly(rank, ranks):
    """Return the errors of calls that leave the pipeline unchanged, and a later evaluation."""
    pipe, dataset, found = make(rank), TensorDataset(*torch.randn(2, 24, 5).double()), []
    batches, part = (
        DataLoader(dataset, 8, sampler=DistributedSampler(dataset, count, 0)) for count in (1, 2)
    )

    def attempt(call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")

    def enough(result):
        if result.index == 1:
            raise ValueError("enough")

    for call in (pipe.run, pipe.fit, pipe.evaluate) if rank == 0 else ():  # others take none
        attempt(partial(call, None))
        attempt(partial(call, part))
    run = pipe.run(batches)
    next(run)
    for call in (pipe.evaluate, pipe, pipe.fit):
        attempt(partial(call, batches))
    for _ in run:
        pass
    attempt(lambda: pipe.evaluate([]))
    attempt(lambda: pipe.fit(batches, callbacks=[enough] if rank == 1 else []))
    return found, pipe.evaluate(batches)


def test_what_is_refused_leaves_the_pipeline_as_it_was():
    for_rank_0 = [
        "ValueError: batches: rank 0 needs them, got None",
        "ValueError: batches: a DistributedSampler with num_replicas=2 gives this process a part "
        "of the samples, and nobody would take the rest, as rank 0 has the only loader of a "
        "pipeline, and deals microbatches out to replicas; give it num_replicas=1 and rank=0",
    ]
    for rank, (found, measured) in enumerate(run_ranks(use_wrongly, 2)):
        expected = [
            *(for_rank_0 * 3 if rank == 0 else []),
            "RuntimeError: evaluate: a run of this pipeline has not ended",
            "RuntimeError: calling the pipeline: a run",
            "RuntimeError: run: a run",
            "ValueError: batches: expected at least one to evaluate, got none",
            ("RuntimeError: process 1: ValueError: enough", "ValueError: enough")[rank],
        ]
        for error, said in zip(found, expected, strict=True):
            assert error.startswith(said)
        assert measured["loss"] > 0


def run_badly(rank, ranks):
    """Run with a last minibatch that is too small for two replicas, and with a set in a batch."""
    found, batches = [], data(3, 8, 1)
    for given in (batches, [(batches[0][0], {3})]):
        part = stages(2)[min(rank, 1)]
        with pytest.raises((ValueError, TypeError, st.RankError)) as caught:
            list(make(rank, part, replicas=[1, 2], microbatches=2).run(given))
        found.append(str(caught.value))
    return found


def test_a_batch_that_cannot_be_dealt_ends_the_run():
    for few, odd in run_ranks(run_badly, 3):
        assert "batches[2]: it makes 1 microbatches, and stage 1 has 2 replicas, each of" in few
        assert "batches[0]: the target: expected a tensor, or" in odd
        assert "got a set" in odd
