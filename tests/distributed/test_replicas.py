"""Tests replicated stages over ranks against the oracle, one process and data parallel training."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from helpers import value_programs
from helpers.rank_cases import same
from helpers.ranks import run_ranks
from helpers.replica_programs import (
    RUNS,
    averaging,
    counting,
    data,
    make,
    mse,
    sentences,
    sgd,
    stage_and_replica,
    stages,
    steps,
    total_and_count,
    words,
)
from helpers.ways import travelling
from oracle.replicas import ReplicaOracle
from oracle.schedules import CHUNKED
from oracle.sgd import AveragingSGD
from torch import nn

import spectrain_ext as st

pytestmark = pytest.mark.processes

METHODS = [name for name in st.methods() if name != "xgrad"]  # xgrad: one stage


def close(found, expected, where=""):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=where or None)


def cases(counts, microbatches, methods, **more):
    return [(counts, method, {"microbatches": microbatches, **more}) for method in methods]


def bound_embeddings(rank, ranks):
    found = []
    for method in "1f1b", "auto":
        part = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 4))
        pipe = make(rank, [2], method, part=part, microbatches=2)
        given = (torch.arange(4), torch.randn(4, 4))
        try:
            pipe.fit([given] if rank == 0 else None)
        except (st.RankError, st.StageError) as error:
            found.append(str(error))
    return found


def test_weights_that_a_forward_writes_would_differ_between_replicas():
    for of_rank in run_ranks(bound_embeddings, 2):
        assert len(of_rank) == 2
        assert all(
            "'0.weight' was changed in place in a forward, and replicas" in e for e in of_rank
        )


CASES = {
    2: [
        *cases([2], 4, ["sync", "1f1b", "spectrain"]),
        *cases([2], 4, ["vanilla"], clip_norm=0.02),
        *cases([2], 2, ["spectrain"], recompute=True, window=3),
    ],
    3: [
        *cases([2, 1], 4, ["sync", "pipedream", "spectrain-stash", "pipedream-2bw"]),
        *cases([1, 2], 4, ["zb-h1", "vanilla"]),
        *cases([2, 1], 4, ["gpipe"], clip_norm=0.05, clip_scope="global"),
        *cases([1, 2], 4, ["1f1b"], clip_norm=0.05, clip_scope="global"),
        *cases([2, 1], 4, ["vanilla"], share_loss=True, window="wide"),
        *cases([1, 2], 2, ["vanilla"], share_loss=True, window=[5, 3]),
        *cases([1, 2], 2, ["spectrain"]),
    ],
    4: [
        *cases([2, 2], 4, ["gpipe", "1f1b", "zb-h1", "spectrain", "spectrain-local", "xpipe"]),
        *cases([2, 2], 4, ["lwp-w", "second-order", "pipedream-vertical-sync", "pipedream-2bw"]),
        *cases([1, 2, 1], 6, ["1f1b", "pipedream-2bw", "spectrain-stash", "spectrain"]),
        *cases([2, 2], 4, ["pipedream"], recompute=True),
    ],
}


def train(rank, ranks, chosen, way="direct"):
    """Return losses if any, the stage's weights and the optimizer's momentum for each case."""
    found = []
    for counts, method, settings in chosen:
        optimizer = averaging if method == "spectrain-smoothed" else sgd
        with travelling(way):
            pipe = make(rank, counts, method, optimizer, scheduler=steps, **settings)
            losses = []
            for run in RUNS:
                results = list(pipe.run(None if rank else data(*run)))
                assert [result.index for result in results] == list(range(run[0]))
                with suppress(RuntimeError):
                    losses.append([result.loss.item() for result in results])
        found.append((losses, pipe.state_dict(), pipe.optimizers[0].state_dict()["state"]))
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_methods_are_what_the_oracle_says(ranks):
    check(ranks, CASES[ranks])


@pytest.mark.parametrize("way", ["staged", "apart"])
def test_methods_are_what_the_oracle_says_whatever_way_messages_go(way):
    check(5, cases([2, 3], 6, ["vanilla", "1f1b", "spectrain"]), way)


@pytest.mark.nightly
@pytest.mark.parametrize("counts", [[2, 2], [2, 1, 1], [1, 3], [3, 1]], ids=str)
def test_all_methods_are_what_the_oracle_says(counts):
    unlike = () if len({*counts}) == 1 else ("pipedream-vertical-sync", *CHUNKED)
    if counts[0] > 1:  # its replicas read different stale weights
        unlike = (*unlike, "dc-asgd", "gap-aware")
    check(4, cases(counts, 12, [name for name in METHODS if name not in unlike]))


def check(ranks, chosen, way="direct"):
    torch.set_num_threads(1)
    for (counts, method, settings), *mine in zip(
        chosen, *run_ranks(train, ranks, chosen, way), strict=True
    ):
        where = f"{counts} {method} {settings}"
        more = {k: v for k, v in settings.items() if k != "share_loss"}
        if isinstance(more.get("window"), int):
            more["window"] = [more["window"]] * len(counts)
        optimizer = of_torch()
        if method == "spectrain-smoothed":
            optimizer = of_torch(AveragingSGD, smoothed=True)
        oracle = ReplicaOracle(stages(len(counts)), counts, optimizer, mse, method, steps, **more)
        expected = [[loss.item() for loss in oracle.run(data(*run))] for run in RUNS]
        for rank, (losses, state, momentum) in enumerate(mine):
            k, replica = stage_and_replica(counts, rank)
            known = k == len(counts) - 1 or settings.get("share_loss")
            assert len(losses) == (len(RUNS) if known else 0), where
            close(losses, expected if known else [], where)
            close(state, {f"{k}.{n}": t for n, t in oracle.stages[k].state_dict().items()}, where)
            if replica:  # the bits of the first replica
                same((state, momentum), mine[rank - replica][1:], where)


def of_torch(kind=torch.optim.SGD, **more):
    return lambda params: kind(params, lr=0.03, momentum=0.9, weight_decay=0.01, **more)


# Against one process

#: Losses that count words, wherever the long microbatches are, and phases that change together.
COUNTED = [
    ([1, 2], "1f1b", {"share_loss": True, "clip_norm": 0.05}),
    ([2, 1], "1f1b+gpipe@3", {"share_loss": True}),
    ([2, 1], "gpipe", {"count": counting}),
]
#: A codec's draws belong to a microbatch, whichever rank computes it.
NESTED = [([1, 2], None), ([2, 1], st.codecs.Int8())]


def count_words(pipe):
    """Return losses of a run and of an epoch, an evaluation, and the weights."""
    losses = [result.loss.item() if result.has_loss else None for result in pipe.run(sentences())]
    epoch, evaluated = pipe.fit([*sentences(3)]), pipe.evaluate([*sentences(2)])
    return losses, [epoch, evaluated], pipe.state_dict()


def run_others(rank, ranks):
    found = []
    for counts, method, settings in COUNTED:
        more = {"loss_fn": total_and_count, "microbatches": 4, **settings}
        part = words(stage_and_replica(counts, rank)[0])
        found.append(count_words(make(rank, counts, method, part=part, **more)))
    return found + [value_programs.nested(rank, counts, codec) for counts, codec in NESTED]


def test_synchronous_methods_are_those_of_one_process():
    torch.set_num_threads(1)
    found = list(zip(*run_ranks(run_others, 3), strict=True))
    for (_, method, settings), of_ranks in zip(COUNTED, found, strict=False):
        more = {"microbatches": 4, **settings}
        shared = more.pop("share_loss", False)
        pipe = st.Pipeline([words(0), words(1)], sgd, total_and_count, method, **more)
        losses, means, whole = count_words(pipe)
        assert of_ranks[2][0] != [None] * len(losses)
        for its_losses, its_means, state in of_ranks:
            known = shared or its_losses[0] is not None
            close(its_losses, losses if known else [None] * len(losses))
            close([its_means, state], [means, {key: whole[key] for key in state}], method)
    for (_, codec), of_ranks in zip(NESTED, found[len(COUNTED) :], strict=True):
        *measured, whole = value_programs.nested(codec=codec)
        for *its_own, state in of_ranks:
            expected = [*measured, {key: whole[key] for key in state}]
            torch.testing.assert_close([*its_own, state], expected, rtol=1e-5, atol=1e-6)


class Scaled(nn.Module):
    """Only elementwise operations and column sums: the same bits on a GPU every time."""

    def __init__(self, k):
        super().__init__()
        g = torch.Generator().manual_seed(k)
        self.scale = nn.Parameter(torch.randn(5, generator=g, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(5, generator=g, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x * self.scale + self.shift)


def run_on(rank, ranks, counts, method, device):
    """Return losses and this rank's state; all ranks share one device."""
    part = Scaled(stage_and_replica(counts, rank)[0])
    more = {"device": device, "microbatches": 2, "share_loss": True, "timeout": 60.0}
    pipe = make(rank, counts, method, part=part, **more)
    losses = [result.loss.item() for result in pipe.run(None if rank else data(9))]
    state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
    return losses, state


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("counts", "method"), [([1, 1], "spectrain"), ([1, 2], "gpipe")], ids=["stages", "replicas"]
)
def test_ranks_on_one_gpu_give_the_bits_of_one_process_there(counts, method, device="cuda:0"):
    parts, devices = [Scaled(0), Scaled(1)], [device] * 2
    pipe = st.Pipeline(parts, sgd, mse, method, devices=devices, microbatches=2)
    expected = [result.loss.item() for result in pipe.run(data(9))]
    for losses, state in run_ranks(run_on, sum(counts), counts, method, device):
        assert losses == pytest.approx(expected, rel=1e-6)  # replicas add theirs in float64
        same(state, {key: pipe.state_dict()[key].cpu() for key in state}, method)


def tie(rank, ranks):
    """Return losses and this rank's state if a stage between two tied ones may have replicas."""
    counts = [1, ranks - 2, 1]
    k, _ = stage_and_replica(counts, rank)
    part = Scaled(k)
    if k == 2:
        part.scale = Scaled(0).scale
        part.cut = st.partitioning.Cut(ties={"scale": (0, "scale")})
    pipe = make(rank, counts, "gpipe", part=part, microbatches=2, share_loss=True)
    losses = [result.loss.item() for result in pipe.run(data(6))]
    if rank == 0:
        part.scale.data.mul_(2.0)
    return losses, pipe.evaluate(data(5)), part.state_dict()


def test_replicas_between_tied_stages():
    found, expected = run_ranks(tie, 4), run_ranks(tie, 3)
    close(found, [expected[k] for k in (0, 1, 1, 2)])
    assert torch.equal(found[0][2]["scale"], found[3][2]["scale"])


class Choosy(nn.Module):
    """Has a parameter that some microbatches use, and one that none uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(5, 5).double()
        self.sometimes = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        return y * self.sometimes if x[0, 0] > 0 else y


def use_sometimes(rank, ranks):
    part = Choosy()
    list(make(rank, [2], "gpipe", part=part, microbatches=2).run(data(9)))
    return part.state_dict()


def test_parameters_that_not_every_replica_has_a_gradient_of():
    part = Choosy()
    list(st.Pipeline([part], sgd, mse, "gpipe", microbatches=2).run(data(9)))
    first, second = run_ranks(use_sometimes, 2)
    same(first, second, "replicas")
    close(first, dict(part.state_dict()))
    assert first["never"].eq(1).all() and not first["sometimes"].eq(1).any()  # not even decayed


def shard(rank, ranks, path):
    """Return losses, weights and states for each way to update a stage, and of a checkpoint."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to import

    def sharded(params):
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.03, weight_decay=0.1)

    def whole(params):
        made = torch.optim.AdamW(params, lr=0.03, weight_decay=0.1)
        made.param_groups[0]["called"] = lambda: 0  # its text differs between ranks
        return made

    def made(optimizer, dtype=torch.float64, **more):
        part = stages(1, layers=2)[0].to(dtype)
        more |= {"microbatches": 4, "clip_norm": 0.05}
        return make(rank, [ranks], optimizer=optimizer, part=part, **more)

    def losses(pipe, batches):
        return [result.loss.item() for result in pipe.run(batches)]

    found, narrow = [], [(x.bfloat16(), y.bfloat16()) for x, y in data(6)]
    for optimizer in (whole, sharded):
        pipe = made(optimizer, torch.bfloat16, master_dtype=torch.float32)
        of_shard = pipe.optimizers[0] if optimizer is whole else pipe.optimizers[0].optim
        trained = losses(pipe, narrow), pipe.state_dict(), [*pipe.masters().values()]
        found.append([*trained, len(of_shard.state)])
    kept, other = made(sharded), made(sharded)
    losses(kept, data(3))
    kept.optimizers[0].consolidate_state_dict()  # on rank 0, which saves
    st.checkpoint.save(path, kept)
    st.checkpoint.load(path, other)
    return *found, [losses(each, data(7)[3:]) for each in (kept, other)]


def test_an_optimizer_whose_state_is_sharded_over_the_replicas(tmp_path):
    """ZeRO: each replica stores and updates a part, and the step exchanges the parts."""
    first, second = run_ranks(shard, 2, str(tmp_path / "c"))
    same(first[0], second[0], "replicas")
    for whole, sharded, (kept, resumed) in (first, second):
        assert (sharded.pop(), whole.pop()) == (2, 4)
        same(sharded, whole, "sharded")
        assert kept == resumed


# What a run does


def record_sums(rank, ranks):
    """Return the order of gradients, sums of buckets and the step in one minibatch."""
    events, all_reduce = [], dist.all_reduce
    part = nn.Sequential(*(nn.Linear(600, 600).double() for _ in range(6)))
    pipe = make(rank, [2], part=part, microbatches=4)
    for p in part.parameters():
        p.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    pipe.optimizers[0].register_step_pre_hook(lambda *_: events.append("step"))

    def noted(tensor, **more):
        events.append("sum")
        return all_reduce(tensor, **more)

    dist.all_reduce = noted
    list(pipe.run([(torch.ones(8, 600).double(), torch.ones(8, 600).double())]))
    return events


def test_gradients_are_summed_while_the_backward_runs():
    for events in run_ranks(record_sums, 2):
        # four microbatches, two per replica: the sums belong to the second backward
        gradients = [n for n, event in enumerate(events) if event == "gradient"]
        assert len(gradients) == 2 * 12
        assert gradients[12] < events.index("sum") < gradients[-1], events
        assert "sum" not in events[events.index("step") :]


def trace(rank, ranks):
    """Return the weights after a run, and the forwards, if a stage without any has replicas."""
    part = [*stages(1), nn.Tanh(), nn.Tanh(), *stages(1)][rank]
    pipe = make(rank, [1, 2, 1], "sync", part=part, microbatches=4)
    seen = st.Trace()
    list(pipe.run(data(3), trace=seen))
    forwards = [span for span in seen.spans() if span.kind.value == "forward"]
    spans = [(span.stage, span.minibatch, span.microbatch) for span in forwards]
    return pipe.state_dict(), spans


def test_a_stage_without_parameters_and_a_trace():
    pipe = st.Pipeline([*stages(1), nn.Tanh(), *stages(1)], sgd, mse, "sync", microbatches=4)
    list(pipe.run(data(3)))
    for rank, (state, spans) in enumerate(run_ranks(trace, 4)):
        close(state, {key: pipe.state_dict()[key] for key in state})
        own = 2 if rank in (1, 2) else 4  # microbatches of a replica
        assert spans == [([0, 1, 1, 2][rank], i, j) for i in range(3) for j in range(own)]
