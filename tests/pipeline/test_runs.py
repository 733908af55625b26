"""Tests runs: results, leaving early, failures, suspended runs, release."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext

import pytest
import torch
from helpers.pipeline_cases import (
    METHODS,
    Compared,
    batches,
    close,
    every_method,
    losses,
    mse,
    sgd,
    tanh_stages,
    torch_sgd,
)
from oracle.definition import Oracle
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import spectrain_ext as st
from spectrain_ext.transport import Stream

pytestmark = pytest.mark.usefixtures("float64")


@every_method
def test_results_come_as_soon_as_they_are_there(method):
    pipe, taken = st.Pipeline(tanh_stages(4), sgd(), mse, method), []
    for expected, result in enumerate(pipe.run(taken.append(b) or b for b in batches(12))):
        assert result.index == expected
        assert result.loss.dim() == 0
        assert not result.loss.requires_grad
        assert len(taken) <= min(12, result.index + 4)
        result.loss.mul_(0)  # belongs to the caller
    assert len(taken) == 12


@pytest.mark.parametrize("closes", [False, True])
def test_a_run_that_is_closed_or_dropped_drains_and_one_that_was_not_begun_does_nothing(closes):
    compared, taken = Compared(tanh_stages(3), "spectrain"), []
    never = compared.pipe.run(batches(3))
    with torch.no_grad():
        results = compared.pipe.run(taken.append(batch) or batch for batch in batches(6))
        next(results)
        with pytest.raises(RuntimeError, match="a run of this pipeline has not ended"):
            next(never)
        if closes:
            results.close()
        del results
        assert not torch.is_grad_enabled()
    compared.oracle.run(taken)
    compared.check_weights()
    compared.run(batches(3))


def planned(where, stage, at):
    """Return a function that counts what stages do, and raises once."""
    calls = []

    def count(what, index=stage):
        if (what, index) == (where, stage):
            calls.append(what)
            if len(calls) == at + 1:
                raise ArithmeticError(f"no {what}")

    return count


def counted(stages, count):
    """Count the forwards and backwards of stages."""
    for k, stage in enumerate(stages):

        def hook(module, given, output, k=k):
            count("forward", k)
            if output.requires_grad:
                output.register_hook(lambda gradient: count("backward", k))

        stage.register_forward_hook(hook)
    return stages


WHERE = ("forward", "backward", "loss", "update", "scheduler")


@pytest.mark.parametrize(
    ("method", "where", "stage"),
    [
        (method, where, (0, 1, 3)[(i + j) % 3])
        for i, method in enumerate(METHODS)
        for j, where in enumerate(WHERE)
    ],
)
def test_failures(method, where, stage):
    n, at = 4, 5
    count, made, updates = planned(where, stage, at), [], [0] * n
    uncounted, data = tanh_stages(n), batches(12)
    stages = counted(copy.deepcopy(uncounted), count)
    oracle = Oracle(uncounted, torch_sgd(), mse, method)
    oracle.run(data)

    def loss_fn(output, target):
        count("loss")
        return mse(output, target)

    def scheduler(opt):
        k = len(made)
        opt.register_step_pre_hook(lambda *_: count("update", k))
        opt.register_step_post_hook(lambda *_: updates.__setitem__(k, updates[k] + 1))
        made.append(opt)
        return LambdaLR(opt, lambda updates: (updates and count("scheduler", k)) or 1.0)

    pipe = st.Pipeline(stages, sgd(), loss_fn, method, scheduler=scheduler)
    with pytest.raises(st.StageError) as caught:
        losses(pipe, data)
    error = caught.value
    action = {"scheduler": "update"}.get(where, where)
    at_stage = n - 1 if where == "loss" else stage
    assert (error.stage, error.minibatch, error.action) == (at_stage, at, action)
    assert isinstance(error.__cause__, ArithmeticError)
    assert f"stage {at_stage}, minibatch {at}, {action}: ArithmeticError: no {where}" in str(error)
    for mine, made_here, versions in zip(stages, updates, oracle.versions, strict=True):
        for p, row in zip(mine.parameters(), versions[made_here], strict=True):
            close(p.detach(), row.weight)
            assert p.grad is None
    pipe(torch.randn(2, 5))

    # It runs again and continues.
    nn.ModuleList(uncounted).load_state_dict(nn.ModuleList(stages).state_dict())
    rest = Oracle(uncounted, torch_sgd(), mse, method)
    for mine, theirs, true in zip(made, rest.optimizers, rest.true, strict=True):
        for p, q in zip(mine.param_groups[0]["params"], true, strict=True):
            theirs.state[q]["momentum_buffer"] = mine.state[p]["momentum_buffer"].clone()
    data = batches(9)
    close(torch.stack(losses(pipe, data)), torch.stack(rest.run(data)))


@pytest.mark.parametrize("k", [0, 2])
def test_a_failure_in_the_drain_or_after_another_of_the_device(k, monkeypatch):
    """``close`` raises it; nothing is left on the edges."""

    def fails(_):
        raise RuntimeError("the device has failed")

    stages = counted(tanh_stages(3), planned("backward", k, 1))
    pipe = st.Pipeline(stages, sgd(), mse, microbatches=1)
    results = pipe.run(batches(6))
    next(results)
    monkeypatch.setattr(Stream, "synchronize", fails)
    with pytest.raises(st.StageError, match=f"stage {k}, minibatch 1, backward: .*no backward"):
        results.close()
    monkeypatch.undo()
    assert len(losses(pipe, batches(6))) == 6


def handed_on(results):
    yield from results


def managed(pipe, folder):
    return st.checkpoint.CheckpointManager(folder, pipe).run(batches(9))


#: What a caller iterates over, and leaves while a minibatch in flight is going to fail.
ITERATORS = {
    "break": lambda pipe, _: pipe.run(batches(9)),
    "error": lambda pipe, _: pipe.run(batches(9)),
    "wrapped": lambda pipe, _: handed_on(pipe.run(batches(9))),
    "phases": lambda pipe, _: (each for each in pipe.run(batches(9))),
    "manager": managed,
}
USES = {
    "run": lambda pipe, _: pipe.run(batches(2)),
    "state_dict": lambda pipe, _: pipe.state_dict(),
    "evaluate": lambda pipe, _: pipe.evaluate(batches(2)),
    "save": lambda pipe, folder: st.checkpoint.save(folder / "saved", pipe),
}


@pytest.mark.parametrize("error", [ArithmeticError("planned"), KeyboardInterrupt("planned")])
@pytest.mark.parametrize(("way", "use"), [*zip(ITERATORS, [*USES, "run"], strict=True)])
def test_an_error_after_the_loop_is_raised_by_the_next_use(way, use, error, tmp_path, monkeypatch):
    method = "pipedream+spectrain@5" if way == "phases" else "spectrain"
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, method, microbatches=1)
    turns = iter(range(3))

    def fails(*_):
        if next(turns, None) is None:
            raise error

    hook = list(pipe.children())[2].register_forward_hook(fails)
    printed = []
    monkeypatch.setattr("sys.unraisablehook", printed.append)
    with nullcontext() if way != "error" else pytest.raises(LookupError, match="the caller's"):
        for result in ITERATORS[way](pipe, tmp_path):
            if result.index == 1 and way == "error":
                raise LookupError("the caller's")
            if result.index == 1:
                break
    assert "planned" in str(printed[0].exc_value)
    expected = st.StageError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected, match="planned") as caught:
        USES[use](pipe, tmp_path)
    assert any("after the loop was left" in note for note in caught.value.__notes__)
    hook.remove()
    assert len(losses(pipe, batches(2))) == 2


@pytest.mark.parametrize("error", [OSError("no more data"), KeyboardInterrupt()])
def test_what_the_batches_raise_is_raised_as_it_is(error):
    def data():
        yield from batches(4)
        raise error

    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    with pytest.raises(type(error)) as caught:
        losses(pipe, data())
    assert caught.value is error
    assert len(losses(pipe, batches(3))) == 3


def test_stage_errors_can_be_pickled():
    error = st.StageError(2, 7, "forward", "ValueError: no")
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == str(error) == "stage 2, minibatch 7, forward: ValueError: no"
    assert (found.stage, found.minibatch, found.action) == (2, 7, "forward")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_pipelines_are_not_copied_and_say_what_is(copied):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    with pytest.raises(TypeError, match=r"a Pipeline holds streams .* copied; .*deepcopy the stag"):
        copied(pipe)
    data = batches(4, last=2)
    other = st.Pipeline(copy.deepcopy(list(pipe.children())), sgd(), mse)
    assert losses(other, data) == losses(pipe, data)


@every_method
def test_between_runs_the_modules_are_the_truth(method):
    compared = Compared(tanh_stages(4), method)
    compared.run(batches(7))
    fresh = nn.Sequential(*tanh_stages(4)).state_dict()
    compared.pipe.load_state_dict(fresh)
    close(dict(compared.pipe.state_dict()), dict(fresh))
    with torch.no_grad():
        for stage, true in zip(compared.pipe.children(), compared.oracle.true, strict=True):
            for p, t in zip(stage.parameters(), true, strict=True):
                t.copy_(p.mul_(0.5))
    compared.run(batches(7))


@every_method
def test_calling_the_pipeline_computes_with_the_true_weights(method):
    compared = Compared(tanh_stages(3), method)
    compared.run(batches(6))
    pipe, x = compared.pipe, torch.randn(2, 5, requires_grad=True)
    out = pipe(x)
    close(out, nn.Sequential(*copy.deepcopy(list(pipe.children())))(x))
    out.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in pipe.parameters())
    compared.run(batches(4))  # gradients from outside do not enter a run
    for training in (False, True):
        pipe.train(training)
        assert all(stage.training is training for stage in pipe.children())


@every_method
def test_release(method):
    compared = Compared(tanh_stages(3), method)
    compared.run(batches(5))
    pipe = compared.pipe
    before = copy.deepcopy(list(pipe.parameters()))
    pipe.release()
    assert pipe.weight_version_bytes == 0
    momenta = [s["momentum_buffer"] for opt in pipe.optimizers for s in opt.state.values()]
    for tensor in (*pipe.parameters(), *momenta):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    close(list(pipe.parameters()), before)
    pipe.release()  # nothing is left to do
    compared.run(batches(5))  # with new buffers
    assert pipe.weight_version_bytes > 0


def live():
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("method", [*METHODS, "zb-h1"])
def test_a_run_keeps_nothing(method):
    """Tapes, messages and shares are released: the third run leaves as much as the second."""
    pipe, data = st.Pipeline(tanh_stages(3), sgd(), mse, method, microbatches=2), batches(9)
    counts = []
    for _ in range(3):
        for _ in pipe.run(data):
            pass
        gc.collect()
        counts.append(live())
    assert counts[1] == counts[2]


@every_method
def test_a_pipeline_that_is_dropped_is_freed_at_once(method):
    """GPU buffers must not wait for a garbage collection."""
    data = batches(6)
    gc.collect()
    gc.disable()
    try:
        before = live()
        stages = tanh_stages(3)
        stages[2][0].weight = stages[0][0].weight
        pipe = st.Pipeline(stages, sgd(), mse, method)
        losses(pipe, data)
        pipe.evaluate(data)
        assert live() > before
        del pipe, stages
        assert live() == before
    finally:
        gc.enable()


# What a pipeline shows


def shown(pipe, minibatches, state=""):
    """Check the lines for a pipeline of few stages; return its table without spaces."""
    head, method, *table = repr(pipe).splitlines()
    assert head == f"Pipeline(stages 0 to 2 of 3, minibatches: {minibatches}{state})"
    assert method.startswith("spectrain: 1 microbatch a minibatch")
    while table[0].split()[0] != "stage":  # the description takes several lines
        table.pop(0)
    return [line.split() for line in table[1:]]


def test_it_says_what_it_is_before_in_and_after_runs_failures_and_release():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, "spectrain")
    before, expected = shown(pipe, 0), pipe.predicted_memory()
    for k, (place, memory, stage) in enumerate(
        zip(pipe.places, expected, pipe.children(), strict=True)
    ):
        size = sum(p.numel() for p in stage.parameters())
        late, mib = place.window - 1, f"{memory.weight_bytes / 2**20:.3g}"
        numbers = [k, "cpu", f"{size:,}", place.window, late, memory.versions, mib]
        assert before[k][:7] == [str(number) for number in numbers]
    run = pipe.run(batches(9))
    for _ in range(2):
        next(run)
    assert shown(pipe, 4, ", in a run") == before
    run.close()
    assert shown(pipe, pipe.minibatches) == before and pipe.minibatches == 4
    with pytest.raises(st.StageError):
        pipe.fit([(torch.ones(4, 77), torch.ones(4, 1))])
    assert shown(pipe, pipe.minibatches) == before
    pipe.release()
    assert shown(pipe, pipe.minibatches) == before
    assert "Linear" in "".join(map(repr, pipe.children()))


def test_only_the_first_and_the_last_of_many_stages_are_shown():
    lines = repr(st.Pipeline(tanh_stages(12), sgd(), mse, "gpipe")).splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["0", "1", "2", "3", "...", "9", "10", "11"]
    unmade = st.Pipeline.__new__(st.Pipeline)
    assert repr(unmade) == "Pipeline(its constructor has not ended)"
