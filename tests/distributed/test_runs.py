"""Tests how runs over ranks begin and end: whose batches count, who decides, what may change."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from itertools import count, islice

import pytest
import torch
from helpers import replica_programs
from helpers.rank_cases import Case, same
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import spectrain_ext as st

pytestmark = pytest.mark.processes
mse = nn.functional.mse_loss


class Untouched:
    def __iter__(self):
        raise AssertionError("these batches are not wanted")


# Leaving a run

#: What three ranks train, and the ranks of which each leaves the loop once.
LEFT = [
    (Case("vanilla", (3, 1)), range(3)),
    (Case("vanilla", (3, 2)), range(3)),
    # Minibatches in flight belong to the phase that ends, or to both.
    *((Case(f"pipedream+sync@{after}", (3, 1)), (0, 2)) for after in (3, 6, 8)),
    ([2, 1], (0, 1)),  # replicas
]


def leave(rank, ranks, kind, leaves):
    """Return the number of results seen here, and the updates after each of two runs."""
    if isinstance(kind, Case):
        pipe, data = kind.pipeline(rank), kind.batches([8] * 30)
    else:
        pipe = replica_programs.make(rank, kind, microbatches=2)
        data = replica_programs.data(30)
    made, seen, runs = [], 0, [pipe.run(Untouched() if rank else data)]
    pipe.optimizers[-1].register_step_post_hook(lambda *_: made.append(0))
    closed = runs[0] if leaves else None  # else ``break`` ends the iterator
    for result in runs.pop():
        seen += 1
        if rank == leaves and result.index == 5:
            break
    if closed:
        closed.close()
    first = len(made)
    list(pipe.run(data[:4]))
    assert pipe.minibatches == len(made)
    return seen, first, len(made)


def leave_all(rank, ranks):
    """Return what each leaving gives; then drop an iterator after two results in all ranks."""
    found = [leave(rank, ranks, kind, who) for kind, leaves in LEFT for who in leaves]
    case = Case("vanilla", (3, 1))
    pipe = case.pipeline(rank)
    assert len(list(islice(pipe.run(case.batches([8] * 30)), 2))) == 2
    assert len(list(pipe.run(case.batches([8] * 4)))) == 4
    return found


def test_rank_0_decides_when_a_run_ends():
    torch.set_num_threads(1)
    found = zip(*run_ranks(leave_all, 3), strict=True)
    for kind, leaves in ((kind, who) for kind, of in LEFT for who in of):
        seen, firsts, seconds = zip(*next(found), strict=True)
        (first,), (second,) = {*firsts}, {*seconds}  # all made the same updates
        assert second == first + 4, kind
        assert seen == tuple(6 if rank == leaves else first for rank in range(3))
        if leaves:
            assert first == 30, kind
        elif isinstance(kind, Case):
            assert first == leave(None, 1, kind, None)[1], kind
        else:
            assert first < 30


def interrupt(rank, ranks):
    """Return the state after an interrupt in an update of stage 1, early and in the last one.

    That comes when the rank has sent everything.
    """
    found = []
    for update in (4, 10):
        case = Case("spectrain", (3, 1))
        pipe = case.pipeline(rank if ranks > 1 else None)
        left = iter(range(1, update))

        def interrupts(*_, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt

        if rank == 1 or ranks == 1:
            pipe.optimizers[1 if ranks == 1 else 0].register_step_post_hook(interrupts)
        with pytest.raises((KeyboardInterrupt, st.RankError)):
            list(pipe.run(case.batches([8] * 10)))
        found.append(pipe.state_dict())
    return found


def test_a_rank_that_is_interrupted_has_its_true_weights():
    torch.set_num_threads(1)
    for mine, whole in zip(run_ranks(interrupt, 3)[1], interrupt(0, 1), strict=True):
        same(mine, {key: whole[key] for key in mine}, "after an interrupt")


# Changes of the method


def change(rank, ranks):
    """Return losses and weights after changes, some of which are refused."""
    case, found = Case("sync", (3, 1), ties="two"), []
    pipe = case.pipeline(rank if ranks > 1 else None)
    for method, window in (("sync", None), ("spectrain-local", "wide"), ("1f1b+auto@14", None)):
        if ranks > 1:
            with pytest.raises(ValueError, match="; all must have the same"):
                pipe.change("auto" if rank == 1 else "vanilla")
            with pytest.raises(RuntimeError if rank else ValueError, match="there is no 'nope'"):
                pipe.change("vanilla" if rank else "nope")
        pipe.change(method, window=window)
        found += [r.loss for r in pipe.run(case.batches([8] * 6)) if r.has_loss]
    return found, pipe.state_dict()


def test_all_ranks_change_the_method_together():
    torch.set_num_threads(1)
    losses, whole = change(0, 1)
    of_ranks = run_ranks(change, 3)
    same(of_ranks[-1][0], losses, "losses")
    for _, state in of_ranks:
        same(state, {key: whole[key] for key in state}, "weights")


# Evaluations

FIRST = torch.zeros(8, 6)


def evaluate_at_once(rank, ranks):
    """Return whether a pipeline is freed after an evaluation.

    Its last stage's first forward waits for the first stage's second one.
    """
    stage, store = nn.Linear(6, 6), _get_default_store()
    calls = count()

    def computed(*_):
        n = next(calls)
        if rank == 0:
            store.set(f"computed {n}", "")
        elif rank == 2 and n == 0:
            store.wait(["computed 1"], timedelta(seconds=30))

    stage.register_forward_hook(computed)
    pipe = st.DistributedPipeline(stage, replica_programs.sgd, mse, timeout=30.0)
    pipe.evaluate([(FIRST[:4], FIRST[:4])] * 3)
    alive = weakref.ref(pipe)
    gc.collect()
    gc.disable()  # a reference cycle with all buffers would otherwise wait for it
    del pipe
    return alive() is None


def test_stages_evaluate_at_the_same_time():
    assert all(run_ranks(evaluate_at_once, 3))


def broken(*_):
    raise ValueError("broken here")


class Broken:
    """A metric with a state that fails at the end."""

    compute = broken

    def reset(self, *_):
        pass

    update = reset


def breaking_batches():
    yield from [(FIRST, FIRST)] * 2
    broken()


#: What fails in an evaluation, on which rank.
BROKEN = [("metric", 2), ("computed", 2), ("stage", 1), ("batch", 0)]


def evaluate_broken(rank, ranks):
    """Return each evaluation's error, and the modes of the modules after it."""
    found = []
    for what, where in BROKEN:
        stage = nn.Sequential(nn.Linear(6, 6))
        pipe = st.DistributedPipeline(stage, replica_programs.sgd, mse, timeout=30.0)
        metrics = {"m": {"metric": broken, "computed": Broken()}.get(what, mse)}
        if rank == where and what == "stage":
            stage.register_forward_hook(broken)
        given = breaking_batches() if what == "batch" else [(FIRST[:4], FIRST[:4])] * 40
        with pytest.raises(Exception) as caught:
            pipe.evaluate(given, metrics)
        modes = {module.training for module in pipe.modules()}
        found.append((type(caught.value).__name__, str(caught.value), modes))
    return found


def test_an_evaluation_that_fails_on_one_rank_ends_on_all():
    for rank, found in enumerate(run_ranks(evaluate_broken, 3)):
        for (what, where), (name, text, modes) in zip(BROKEN, found, strict=True):
            assert "broken here" in text
            assert modes == {True}
            if what == "computed":
                assert rank != where or name == "ValueError" or "metrics['m']" in text
            elif rank != where:
                assert (name, f"first cause: rank {where}, " in text) == ("RankError", True)


# Tied weights


def tie(rank, ranks):
    """Return evaluations after changes of the home's weight, and an output."""
    case, found = Case("pipedream-2bw", (3, 1), ties="two"), []
    pipe = case.pipeline(rank if ranks > 1 else None)
    first, last = (list(pipe.children())[k].linear.weight for k in (0, -1))

    def evaluate():
        found.append(pipe.evaluate(case.batches([8] * 4))["loss"])

    if rank == 2:
        last.data.zero_()  # the first stage's weight counts
    evaluate()
    for change in (lambda: first.mul_(0.5), lambda: first.data.mul_(2.5)):
        for n, _ in enumerate(pipe.run(case.batches([8] * 5))):
            if rank == 0 and n == 3:
                break
        if rank == 0:
            with torch.no_grad():
                change()
        if len(found) == 1:
            last.grad = torch.ones_like(last)
        evaluate()
    with torch.inference_mode():
        evaluate()
    pipe.release()
    list(pipe.run(case.batches([])))
    if rank == 0:
        next(pipe.children()).linear.weight.data.mul_(0.5)
    evaluate()
    torch.manual_seed(3)
    output = pipe.eval()(case.batches([8])[0][0])
    return found, None if output is None else output.detach()


def test_copies_of_tied_weights_follow_between_runs():
    torch.set_num_threads(1)
    found, output = tie(0, 1)
    assert len({*found}) == 5  # evaluations move a running mean
    of_ranks = run_ranks(tie, 3)
    assert [each for each, _ in of_ranks] == [found] * 3
    assert torch.equal(of_ranks[-1][1], output)
