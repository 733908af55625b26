"""Tests evaluations, whole trainings, several observers, and the content of results."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import io
import itertools
import re
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from helpers.checked_streams import CheckedStream, unchecked_streams
from helpers.interrupting import Interrupts
from helpers.pipeline_cases import (
    batches,
    close,
    every_method,
    float64,  # noqa: F401  # a fixture
    losses,
    mse,
    sgd,
    tanh_stages,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import spectrain_ext as st
from spectrain_ext.pipeline import loops

ABSOLUTE = nn.L1Loss()


class Noted(nn.Module):
    """Changes its input in place, and records whether there was a graph."""

    def __init__(self):
        super().__init__()
        self.graphs = []

    def forward(self, x):
        self.graphs.append(torch.is_grad_enabled())
        return x.mul_(2)


def living(n=3):
    """Return stages that draw random numbers and keep statistics in training."""
    return [
        nn.Sequential(Noted(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Tanh())
        for _ in range(n)
    ]


def expected(pipe, data, *functions):
    """Return the means over all samples, in one process without a pipeline."""
    model = nn.Sequential(*copy.deepcopy(list(pipe.children()))).eval()
    with torch.no_grad():
        pairs = [(model(x.clone()), y) for x, y in data]
        total = sum(len(y) for _, y in pairs)
        return [sum(f(*pair).item() * len(pair[1]) for pair in pairs) / total for f in functions]


class Together:
    """A metric with a state: keeps its arguments."""

    def __init__(self):
        self.resets = 0
        self.given = []

    def reset(self):
        self.resets += 1
        self.given.clear()

    def update(self, output, target):
        assert not output.requires_grad
        self.given.append((output, target))

    def compute(self):
        outputs, targets = map(torch.cat, zip(*self.given, strict=True))
        return (outputs - targets).abs().amax()


@every_method
def test_an_evaluation_measures_the_true_weights(method):
    pipe = st.Pipeline(living(), sgd(), mse, method, microbatches=2)
    test = batches(7, size=4, last=1)
    for _ in range(2):
        for _ in pipe.run(batches(6, size=4)):
            pass
        biggest = Together()
        found = pipe.evaluate(test, {"mse": mse, "biggest": biggest, "mean": ABSOLUTE})
        assert list(found) == ["mse", "biggest", "mean"]
        first, last = expected(pipe, test, mse, ABSOLUTE)
        assert found["mse"] == pytest.approx(first, rel=1e-12)
        assert found["mean"] == pytest.approx(last, rel=1e-12)
        assert biggest.resets == 1
        assert found["biggest"] == max(
            (output - target).abs().max().item() for output, target in biggest.given
        )
        for (_, kept), (_, target) in zip(biggest.given, test, strict=True):
            assert torch.equal(kept, target)
        assert pipe.evaluate(test) == {"loss": found["mse"]}
    assert [stage[0].graphs[-7:] for stage in pipe.children()] == [[False] * 7] * 3


@every_method
def test_training_goes_on_as_if_nobody_had_evaluated(method):
    data, test = batches(6, size=4), batches(3, size=11)
    pipes = []
    for evaluates in (False, True):
        torch.manual_seed(1)
        pipe = st.Pipeline(living(), sgd(), mse, method)
        loader = DataLoader(TensorDataset(*map(torch.cat, zip(*data, strict=True))), 4, True)
        for _ in range(2):
            if evaluates:
                pipe.evaluate(DataLoader(TensorDataset(*test[0]), 2, shuffle=True))
                before = pipe.weight_version_bytes, pipe.measured_memory()
                pipe.evaluate(test)
                assert (pipe.weight_version_bytes, pipe.measured_memory()) == before
            found = losses(pipe, loader)
        pipes.append((found, torch.rand(3), pipe.state_dict()))
    (one, drawn, state), (other, again, same) = pipes
    assert one == other
    assert torch.equal(drawn, again)
    assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())


def test_an_evaluation_needs_no_buffers_of_weights():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, "spectrain")
    test = batches(3)
    found = pipe.evaluate(test)
    pipe.release()
    assert pipe.evaluate(test) == found
    assert pipe.weight_version_bytes == 0


@pytest.mark.parametrize("what", ["metric", "stage", "batch", "interrupt"])
def test_all_modes_are_restored_whatever_happens(what):
    stages = living()
    stages[0].eval()
    stages[1][2].eval()
    stages[2][2].eval()
    pipe = st.Pipeline(stages, sgd(), mse)
    before = {name: module.training for name, module in pipe.named_modules()}
    error = KeyboardInterrupt if what == "interrupt" else ValueError
    inside = []

    def broken(*_):
        inside.append({module.training for module in pipe.children()})
        raise error("broken")

    def given():
        yield from batches(3, size=4)
        if what == "batch":
            broken()

    handle = stages[1].register_forward_hook(broken) if what in ("stage", "interrupt") else None
    with pytest.raises((ValueError, KeyboardInterrupt, st.StageError), match=r"broken") as raised:
        pipe.evaluate(given(), {"mine": broken} if what == "metric" else None)
    if what == "metric":
        assert "metrics['mine']" in str(raised.value)
    assert {name: module.training for name, module in pipe.named_modules()} == before
    assert inside[0] == {False}
    if handle is not None:
        handle.remove()
    for stage in stages[1:]:
        stage[2].eval()
    before = {name: module.training for name, module in pipe.named_modules()}
    assert pipe.evaluate(batches(2))["loss"] > 0
    assert {name: module.training for name, module in pipe.named_modules()} == before


def test_whatever_train_does_beside_flags_is_done():
    class Switching(nn.Linear):
        calls = 0

        def train(self, mode=True):
            self.calls += 1
            return super().train(mode)

    stage = Switching(5, 5)
    pipe = st.Pipeline([stage], sgd(), mse)
    stage.calls = 0
    pipe.evaluate(batches(2))
    assert (stage.calls, stage.training) == (2, True)
    stage.eval()
    pipe.evaluate(batches(2))
    assert (stage.calls, stage.training) == (3, False)


def test_a_batch_without_samples_is_not_measured():
    pipe, data = st.Pipeline(living(), sgd(), mse), batches(4, size=4)
    none = (torch.empty(0, 5), torch.empty(0, 5))
    biggest = [Together(), Together()]
    found = [
        pipe.evaluate(given, {"mse": mse, "biggest": metric})
        for given, metric in zip((data, [none, *data, none]), biggest, strict=True)
    ]
    assert found[0] == found[1]
    assert [len(metric.given) for metric in biggest] == [4, 4]
    with pytest.raises(ValueError, match="batches: expected at least one to evaluate, got none"):
        pipe.evaluate([none])


@dataclass
class Passed:
    """A class that torch's trees treat as a leaf."""

    output: torch.Tensor
    inside: list[torch.Tensor]


class Passes(nn.Module):
    def forward(self, x):
        return Passed(2 * x, [x])


def test_metrics_may_keep_what_they_are_given():
    """Including the last stage's input, which is in a receive buffer."""
    kept = []

    class Keeping(Together):
        def update(self, output, target):
            kept.append(output)

        def compute(self):
            return 0

    pipe = st.Pipeline([nn.Linear(5, 5), Passes()], sgd(), lambda o, y: mse(o.output, y))
    pipe.evaluate(batches(5), {"mine": Keeping()})
    assert len(kept) == 5
    for found in kept:
        assert torch.equal(found.output, 2 * found.inside[0])


def test_runs_and_evaluations_do_not_meet():
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(4)
    run = pipe.run(data)
    next(run)
    with pytest.raises(RuntimeError, match="evaluate: a run of this pipeline has not ended"):
        pipe.evaluate(data)
    run.close()

    def inside(*_):
        next(pipe.run(data))

    with pytest.raises(st.StageError, match="run: an evaluation of this pipeline has not ended"):
        pipe.evaluate(data, {"mine": inside})
    assert len(losses(pipe, data)) == 4


@pytest.mark.parametrize(
    ("metrics", "error", "text"),
    [
        ([mse], TypeError, r"metrics: expected a mapping of names to metrics, got list"),
        ({1: mse}, TypeError, r"metrics: expected str as names, got 1"),
        ({"a": 3}, TypeError, r"metrics\['a'\]: expected a function \(output, target\), or"),
        ({"a": Together}, TypeError, r"metrics\['a'\]: expected .*, got the class Together"),
        ({"a": lambda o, t: o}, st.StageError, r"number, got torch.float64 of shape \(3, 5\)"),
        ({"a": lambda o, t: None}, st.StageError, r"a number, got NoneType; in metrics\['a'\]"),
    ],
)
def test_metrics_that_are_none(metrics, error, text):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    with pytest.raises(error, match=text):
        pipe.evaluate(batches(2), metrics)
    with pytest.raises(ValueError, match="batches: expected at least one to evaluate, got none"):
        pipe.evaluate([])


def test_evaluations_order_their_streams(monkeypatch):
    """Without the copies' waits, the checked streams of all tests here report errors."""
    waits = CheckedStream.wait
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)

    def deaf(stream, event):
        if not stream.name.startswith("compute stream"):
            waits(stream, event)

    monkeypatch.setattr(CheckedStream, "wait", deaf)
    with pytest.raises(st.StageError, match="OrderingError"):
        pipe.evaluate(batches(4))


@pytest.mark.parametrize(("first", "then"), [(17, None), (61, 23)])
def test_an_interrupt_at_any_line_of_an_evaluation(first, then):
    with unchecked_streams():
        stages = living(2)
        stages[1][3].eval()
        pipe, data = st.Pipeline(stages, sgd(), mse), batches(3, size=4)
        modes = [module.training for stage in stages for module in stage.modules()]
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        drawn, found = torch.get_rng_state(), pipe.evaluate(data)
        times = 0
        for n in itertools.count(first // 2, first):
            lines = [n] if then is None else [n, then]
            with contextlib.suppress(KeyboardInterrupt), Interrupts(*lines) as interrupts:
                pipe.evaluate(data)
            if len(interrupts.left) == len(lines):
                break
            times += 1
            if then is not None:
                assert pipe.state_dict()  # the next user of the pipeline finishes the end
            assert [module.training for stage in stages for module in stage.modules()] == modes
            assert torch.equal(torch.get_rng_state(), drawn)
            now = pipe.state_dict()
            assert all(torch.equal(tensor, now[name]) for name, tensor in state.items())
        assert times > 20
        assert pipe.evaluate(data) == found
        assert len(losses(pipe, data)) == 3


@pytest.mark.parametrize(
    "inside",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_an_evaluation_may_take_place_inside(inside):
    pipe, data = st.Pipeline(living(), sgd(), mse, microbatches=2), batches(4, size=4)
    with inside():
        found = pipe.evaluate(data)["loss"]
    assert found == pytest.approx(pipe.evaluate(data)["loss"], rel=0.1)
    assert len(losses(pipe, data)) == 4


@pytest.mark.cuda
def test_an_evaluation_on_a_gpu():
    pipe = st.Pipeline(living(), sgd(), mse, "spectrain", ["cuda:0"] * 3)
    test = batches(9, size=64, last=3)
    on_gpu = [(x.cuda(), y.cuda()) for x, y in test]
    for _ in range(2):
        biggest = Together()
        kept = [r.kept for r in pipe.run(on_gpu, keep=lambda output, target: target)]
        assert all(torch.equal(one, y) for one, (_, y) in zip(kept, on_gpu, strict=True))
        found = pipe.evaluate(test, {"mse": mse, "biggest": biggest})
        assert found["mse"] == pytest.approx(expected(pipe, on_gpu, mse)[0], rel=1e-12)
        for (_, target), (_, y) in zip(biggest.given, test, strict=True):
            assert torch.equal(target.cpu(), y)


# Whole trainings


@every_method
def test_fit_is_one_run_over_all_epochs(method):
    data = batches(5, size=4, last=3)
    torch.manual_seed(2)
    one = st.Pipeline(tanh_stages(3), sgd(), mse, method)
    torch.manual_seed(2)
    other = st.Pipeline(tanh_stages(3), sgd(), mse, method)
    seen = []
    means = one.fit(data, epochs=3, callbacks=[seen.append, lambda result: seen.append(None)])
    found = losses(other, data * 3)
    assert seen[1::2] == [None] * 15
    assert [result.index for result in seen[::2]] == list(range(15))
    assert [result.loss for result in seen[::2]] == found
    assert means == [sum(map(float, found[i : i + 5])) / 5 for i in (0, 5, 10)]
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor)


def test_fit_goes_through_the_batches_anew():
    told = []

    class Sampler(DistributedSampler):
        def set_epoch(self, epoch):
            told.append(epoch)
            super().set_epoch(epoch)

    inputs = torch.randn(12, 5)
    sampler = Sampler(range(12), num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(TensorDataset(inputs, inputs), 4, sampler=sampler)
    given = []

    class First(nn.Linear):
        def forward(self, x):
            given.append(x.detach().clone())
            return super().forward(x)

    pipe = st.Pipeline([First(5, 5)], sgd(), mse, "vanilla")
    assert len(pipe.fit(loader, 2)) == 2
    assert told == [0, 1]
    assert not torch.equal(torch.cat(given[:3]), torch.cat(given[3:]))


def shards():
    """Yield loaders that shard the samples, and the name of the sharding object."""
    plain, pair = TensorDataset(torch.randn(12, 5)), {"num_replicas": 2, "rank": 0}
    halves = DistributedSampler(plain, **pair)
    yield DataLoader(plain, 4, sampler=halves), ("DistributedSampler", "num_replicas", 2)
    nested = BatchSampler(BatchSampler(halves, 2, False), 2, False)
    yield DataLoader(plain, batch_sampler=nested), ("DistributedSampler", "num_replicas", 2)
    three = {"num_processes": 3, "process_index": 0}

    class Shard(IterableDataset):  # as in Accelerate and transformers
        num_processes, process_index = 3, 0

        def __iter__(self):
            return iter(plain)

    part = ("Shard", "num_processes", 3)
    yield SimpleNamespace(base_dataloader=DataLoader(Shard())), part

    class Dispatcher(DataLoader):
        state = SimpleNamespace(**three)

    yield Dispatcher(plain), ("Dispatcher", "num_processes", 3)
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.data_loader import BatchSamplerShard

        sampler = BatchSamplerShard(BatchSampler(range(12), 4, False), **three)
        part = ("BatchSamplerShard", "num_processes", 3)
        yield DataLoader(plain, batch_sampler=sampler), part
    yield DataLoader(plain, sampler=DistributedSampler(plain, 1, 0)), None
    yield DataLoader(SimpleNamespace(num_processes=4), 4, sampler=range(12)), None  # its workers


def test_what_takes_a_part_of_the_samples_is_found():
    for loader, expected in shards():
        assert loops.share_of(loader) == expected
    inputs = torch.randn(12, 5)
    data = TensorDataset(inputs, inputs)
    half = DataLoader(data, 3, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)  # one per process, made by hand
    assert len(list(pipe.run(half))) == 2


def test_fit_refuses_what_cannot_be_gone_through_again():
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    data = batches(3)
    with pytest.raises(ValueError, match="batches: a generator can be gone through only once"):
        pipe.fit((batch for batch in data), 2)
    assert len(pipe.fit(batch for batch in data)) == 1

    class Once:
        def __init__(self):
            self.left = iter(data)

        def __iter__(self):
            yield from self.left

    with pytest.raises(ValueError, match="batches: they were exhausted after epoch 0"):
        pipe.fit(Once(), 2)
    with pytest.raises(ValueError, match="batches: expected at least one to train on, got none"):
        pipe.fit([])
    for epochs, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="epochs: expected"):
            pipe.fit(data, epochs)
    with pytest.raises(TypeError, match=r"callbacks\[1\]: expected a callable, got int"):
        pipe.fit(data, 1, [print, 3])


def test_a_callback_that_raises_leaves_the_loop():
    pipe, data = st.Pipeline(tanh_stages(3), sgd(), mse), batches(9)

    def enough(result):
        if result.index == 2:
            raise StopAsyncIteration("enough")

    with pytest.raises(StopAsyncIteration, match="enough"):
        pipe.fit(data, 2, [enough])
    pipe.evaluate(data)


def test_fit_asks_for_losses_in_time(monkeypatch):
    monkeypatch.setattr("spectrain_ext.pipeline.loops._FETCHED_AT_ONCE", 2)
    pipe, data = st.Pipeline(tanh_stages(1), sgd(lr=0.0, momentum=0.0), mse, "sync"), batches(7)
    (mean,) = pipe.fit(data)
    assert mean == pytest.approx(sum(map(float, losses(pipe, data))) / 7)


def test_progress_in_lines(monkeypatch, capsys):
    pipe, data = st.Pipeline(tanh_stages(2), sgd(lr=0.0), mse), batches(3)
    first, _, last = losses(pipe, data)
    monkeypatch.setattr("spectrain_ext.extras.perf_counter", itertools.count(20, 20).__next__)
    assert pipe.fit(data, 2, progress=True) == pipe.fit(data, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "1/6  epoch 1/2",
        f"2/6  epoch 1/2  loss {first:.4g}  0.05/s  0:01:20 left",
    ]
    assert lines[-1].startswith(f"6/6  epoch 2/2  loss {last:.4g}  ") and len(lines) == 7
    pipe.fit(iter(DataLoader(Endless(), 4)), progress=True)
    assert capsys.readouterr().err.splitlines()[1].startswith("2 minibatches  loss ")
    pipe.rank = 1  # as in a pipeline over several processes
    pipe.fit(data, progress=True)
    assert capsys.readouterr().err == ""


class Endless(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(2, 5).unbind()] * 12)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    pipe.fit(data, progress=True)
    last = terminal.getvalue().rpartition("━")[2]
    assert re.fullmatch(r"(\x1b\[[0-9;]*m)* 3/3  loss [0-9.]+  [0-9.e+]+/s *\n.*", last, re.DOTALL)
    assert "\x1b[?25l" in terminal.getvalue()  # the cursor is hidden, and is there again at the end
    assert terminal.getvalue().endswith("\x1b[?25h")
    with pytest.raises(ZeroDivisionError):
        pipe.fit(data, 1, [lambda result: 1 / 0], progress=True)
    assert terminal.getvalue().endswith("\x1b[?25h")


def test_a_run_that_nobody_began_is_told(tmp_path):
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    manager = st.checkpoint.CheckpointManager(tmp_path, pipe)
    with pytest.warns(UserWarning, match="nothing was trained"):
        manager.run(data)
    with pytest.warns(UserWarning, match=r"nothing was trained; iterate over it, or call fit\(\)"):
        pipe.run(data)
    with pytest.warns(UserWarning, match="nothing was trained") as told:
        run = pipe.run(data)
        del run
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = pipe.run(data)
        next(run)
        run.close()
        for _ in pipe.run(data):
            break
        pipe.fit(data)
        kept = [r.kept for r in manager.run(data, trace=[st.Trace(), st.Trace()], keep=right)]
        assert len(kept) == 3 and kept[0].dim() == 0
        del run
        gc.collect()


# Observers


class Seen(st.Observer):
    def __init__(self, log, name, ranges=False, fails=None):
        self.log, self.name, self.ranges, self.fails = log, name, ranges, fails

    def note(self, what):
        self.log.append((self.name, what))
        if self.fails == what:
            raise ValueError(f"{self.name} fails in {what}")

    def begin(self, rules, devices):
        self.note("begin")

    def watch(self, stage, handlers):
        def wrapped(kind, handler):
            def run(i, j):
                self.log.append((self.name, kind))
                handler(i, j)

            return run

        self.log.append((self.name, stage.index))
        return {kind: wrapped(kind, handler) for kind, handler in handlers.items()}

    def result(self, result):
        self.note("result")

    def end(self):
        self.note("end")


def test_several_observers_look_on():
    pipe, data, log = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3), []
    trace = st.Trace()
    for _ in pipe.run(data, trace=(Seen(log, "a"), trace, Seen(log, "b"))):
        pass
    of = {name: [what for who, what in log if who == name] for name in "ab"}
    assert of["a"] == of["b"]
    assert of["a"].count("result") == 3
    assert (log[0], log[-1]) == (("a", "begin"), ("b", "end"))
    assert len(trace.spans()) > 3
    plain = []
    for _ in pipe.run(data, trace=[Seen(plain, "a")]):
        pass
    assert [what for _, what in plain] == of["a"]
    assert len(list(pipe.run(data, trace=[]))) == 3
    with pytest.raises(TypeError, match=r"trace\[1\]: expected an Observer, got int"):
        pipe.run(data, trace=[trace, 3])


@pytest.mark.parametrize("what", ["begin", "result", "end"])
def test_one_observer_fails_and_all_end(what):
    pipe, data, log = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3), []
    observers = [Seen(log, "a"), Seen(log, "b", fails=what), Seen(log, "c")]
    with pytest.raises(ValueError, match=f"b fails in {what}"):
        list(pipe.run(data, trace=observers))
    ended = {name for name, noted in log if noted == "end"}
    assert ended == ({"a"} if what == "begin" else {"a", "b", "c"})
    assert len(losses(pipe, data)) == 3


# The content of results


def right(output, target):
    return (output > target).double().mean()


@pytest.mark.parametrize("recompute", [False, True])
@every_method
def test_results_carry_what_was_asked_for(method, recompute):
    data = batches(5, size=6, last=7)
    found = []

    def both(output, target):
        assert not torch.is_grad_enabled()
        return {"right": right(output, target), "sides": (output, target)}

    for keep in (None, both):
        torch.manual_seed(4)
        pipe = st.Pipeline(
            living(), sgd(), mse, method, microbatches=3, window=None, recompute=recompute
        )
        found.append(([(r.loss, r.kept) for r in pipe.run(data, keep=keep)], pipe.state_dict()))
    (plain, state), (kept, same) = found
    assert [loss for loss, _ in plain] == [loss for loss, _ in kept]
    assert all(torch.equal(tensor, same[name]) for name, tensor in state.items())
    assert {one for _, one in plain} == {None}
    for (_, one), (_, y) in zip(kept, data, strict=True):
        output, target = one["sides"]
        assert torch.equal(target, y)
        assert not output.requires_grad
        close(one["right"], right(output, target))
        parts = zip(output.tensor_split(3), target.tensor_split(3), strict=True)
        loss = sum(mse(*part) * len(part[0]) for part in parts) / len(target)
        close(loss, next(a for a, b in kept if b is one))


class Counting(nn.Module):
    """A loss with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return mse(output, target)


def test_a_recomputation_leaves_the_buffers_of_a_loss_whose_outputs_are_kept():
    for keep in (None, right):
        loss = Counting()
        pipe = st.Pipeline(tanh_stages(2), sgd(), loss, "spectrain", recompute=True)
        for _ in pipe.run(batches(4), keep=keep):
            pass
        assert loss.calls == 4


def test_what_cannot_be_kept():
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    with pytest.raises(TypeError, match="keep: expected a callable, got str"):
        pipe.run(data, keep="outputs")
    with pytest.raises(st.StageError, match="a dict or tuple of tensors, got a float; in keep"):
        list(pipe.run(data, keep=lambda output, target: 0.5))
    assert len(losses(pipe, data)) == 3
    for result in pipe.run(data, keep=right):
        assert replace(result, index=8).kept is result.kept
        assert "kept" not in repr(result)


def test_a_loss_that_is_no_number_is_logged(caplog):
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    (loss,) = pipe.fit([(x, y * torch.nan) for x, y in batches(3)])
    assert loss != loss
    assert "fit: the mean loss of epoch 0 is nan" in caplog.text


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5)

    def forward(self, x):
        return x + self.last(self.drop(self.first(x)))


def frozen(module):
    return module.requires_grad_(False)


def block():
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(block().eval(), nn.Linear(5, 5)), "0"),  # as from_pretrained's
        (lambda: nn.Sequential(Residual().eval()), "0"),
        (lambda: nn.Sequential(nn.LSTM(5, 5, 2, dropout=0.1).eval(), First()), "0"),
        # on purpose: fixed statistics, and a frozen part
        (lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).eval()), None),
        (lambda: nn.Sequential(frozen(block()).eval(), nn.Linear(5, 5)), None),
    ],
)
def test_a_part_of_a_stage_in_evaluation_mode_is_warned_of_if_it_trains(make, name):
    pipe = st.Pipeline([nn.Linear(5, 5), make()], sgd(), mse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.fit(batches(2))
    said = [str(warning.message) for warning in caught]
    assert len(said) == (name is not None)
    assert name is None or f"run: stages[1]: {name!r} is in evaluation mode" in said[0]


def test_a_stage_in_evaluation_mode_is_warned_of_once():
    model = Residual().eval()
    pipe = st.Pipeline(st.partition(model, 2, torch.randn(4, 5)), sgd(), mse)
    model.train()  # does not reach the traced stages
    with pytest.warns(UserWarning, match=r"run: stages\[0\] is in evaluation mode.*train\(\) of"):
        pipe.fit(batches(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.fit(batches(2))
        pipe.train()
        for _ in pipe.run(batches(2)):
            pass
        pipe.evaluate(batches(2))
