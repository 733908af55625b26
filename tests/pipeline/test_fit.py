"""Tests whole trainings: inner, because only ranks ask what takes a part of the samples."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers.nonfinite_programs import poisoned
from helpers.pipeline_cases import batches, every_method, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from helpers.random_modules import Function
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import spectrain_ext as st
from spectrain_ext.pipeline import fitting

PROGRESS = "spectrain_ext.tools.metrics.progress_bar"


@every_method
def test_fit_is_one_run_over_all_epochs(method):
    data, seen = batches(5, size=4, last=3), []
    one = st.Pipeline(tanh_stages(3), sgd(), mse, method)
    other = st.Pipeline(copy.deepcopy(list(one.children())), sgd(), mse, method)
    means = one.fit(data, epochs=3, callbacks=[seen.append, lambda result: seen.append(None)])
    found = losses(other, data * 3)
    assert seen[1::2] == [None] * 15
    assert [(r.index, r.loss) for r in seen[::2]] == list(enumerate(found))
    assert means == [sum(map(float, found[i : i + 5])) / 5 for i in (0, 5, 10)]
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_fit_goes_through_the_batches_anew():
    """Another order of a sampler shows that it was told the epoch."""
    given, inputs = [], torch.randn(12, 5)
    sampler = DistributedSampler(range(12), num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(TensorDataset(inputs, inputs), 4, sampler=sampler)
    stage = nn.Linear(5, 5)
    stage.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().clone()))
    assert len(st.Pipeline([stage], sgd(), mse, "vanilla").fit(loader, 2)) == 2
    assert sampler.epoch == 1
    assert not torch.equal(torch.cat(given[:3]), torch.cat(given[3:]))


class Shard(torch.utils.data.IterableDataset):  # as in Accelerate and transformers
    num_processes, process_index = 3, 0

    def __iter__(self):
        return iter([torch.ones(2, 5).unbind()] * 12)


class Dispatcher(DataLoader):
    state = SimpleNamespace(num_processes=3, process_index=0)


def shards():
    """Yield loaders that shard the samples, and the name of the sharding object."""
    plain = TensorDataset(torch.randn(12, 5))
    halves = DistributedSampler(plain, num_replicas=2, rank=0)
    yield DataLoader(plain, 4, sampler=halves), ("DistributedSampler", "num_replicas", 2)
    nested = BatchSampler(BatchSampler(halves, 2, False), 2, False)
    yield DataLoader(plain, batch_sampler=nested), ("DistributedSampler", "num_replicas", 2)
    part = ("Shard", "num_processes", 3)
    yield SimpleNamespace(base_dataloader=DataLoader(Shard())), part
    yield Dispatcher(plain), ("Dispatcher", "num_processes", 3)
    yield DataLoader(plain, sampler=DistributedSampler(plain, 1, 0)), None
    yield DataLoader(SimpleNamespace(num_processes=4), 4, sampler=range(12)), None  # its workers


def test_what_takes_a_part_of_the_samples_is_found():
    for loader, expected in shards():
        assert fitting.share_of(loader) == expected


class Once:
    def __init__(self, data):
        self.left = iter(data)

    def __iter__(self):
        yield from self.left


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (lambda data: (iter(data), 2), ValueError, "batches: a list_iterator can be gone through"),
        (lambda data: (Once(data), 2), ValueError, "batches: they were exhausted after epoch 0"),
        (lambda data: ([],), ValueError, "batches: expected at least one to train on, got none"),
        (lambda data: (data, 0), ValueError, "epochs: expected"),
        (lambda data: (data, 1.5), TypeError, "epochs: expected"),
        (lambda data: (data, True), TypeError, "epochs: expected"),
        (lambda data: (data, 1, [print, 3]), TypeError, r"callbacks\[1\]: expected a .*, got int"),
        (lambda data: (data, 1, print), TypeError, "callbacks: expected a list of functions, got"),
    ],
)
def test_what_fit_refuses(arguments, error, said):
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    with pytest.raises(error, match=said):
        pipe.fit(*arguments(data))
    assert len(pipe.fit(iter(data))) == 1


def test_means_of_losses_that_are_asked_for_in_time_or_no_number(monkeypatch, caplog):
    monkeypatch.setattr("spectrain_ext.pipeline.fitting._FETCHED_AT_ONCE", 2)
    pipe, data = st.Pipeline(tanh_stages(2), sgd(lr=0.0), mse), batches(7)
    assert pipe.fit(data) == [pytest.approx(sum(map(float, losses(pipe, data))) / 7)]
    assert caplog.text == ""
    (loss,) = pipe.fit([(x, y * torch.nan) for x, y in batches(3)])
    assert loss != loss
    assert "fit: the mean loss of epoch 0 is nan" in caplog.text


def test_no_progress_where_no_terminal_is_or_another_rank_shows_it(monkeypatch, capsys):
    pipe, data = st.Pipeline(tanh_stages(2), sgd(lr=0.0), mse), batches(3)
    assert pipe.fit(data, 2, progress=True) == pipe.fit(data, 2)
    pipe.fit(iter(DataLoader(Shard(), 4)), progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    pipe.rank = 1  # as in a pipeline over several processes
    pipe.fit(data, progress=True)
    assert terminal.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        "spectrain_ext.tools.metrics.progress_bar.perf_counter", itertools.count().__next__
    )
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse, clip_norm=1e-9), batches(3, size=4)
    means = pipe.fit(data, epochs=2, progress=True)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    last = " ".join(text.rpartition("━")[2].split())  # over two lines
    number = r"([0-9.,e+-]+)"
    fields = rf"2/2 loss {number} lr 0.05 norm {number} {number}/s {number} samples/s"
    shown = re.fullmatch(rf"6/6 0:00:00 {fields}", last.replace(",", ""))
    loss, norm, speed, samples = map(float, shown.groups())
    before, latest = (mse(pipe(x), y) for x, y in data[1:])  # such steps change no digit shown
    latest.backward()
    assert loss == pytest.approx(before.item(), rel=1e-3)
    total = get_total_norm([p.grad for p in pipe.parameters()])
    assert norm == pytest.approx(total.item(), rel=0.01)
    assert samples == pytest.approx(4 * speed, rel=0.02)
    lines = re.findall(r"epoch (\d)/2  mean loss (\S+)  \d+ s\n", text)
    assert lines == [(str(n + 1), f"{mean:.4g}") for n, mean in enumerate(means)]
    assert "\x1b[?25l" in terminal.getvalue()  # the cursor is hidden, and is there again at the end
    assert terminal.getvalue().endswith("\x1b[?25h")
    with pytest.raises(ZeroDivisionError):
        pipe.fit(data, 1, [lambda result: 1 / 0], progress=True)
    assert terminal.getvalue().endswith("\x1b[?25h")
    pipe.evaluate(data)  # the run has ended


def test_the_norm_that_is_shown_is_of_no_minibatch_that_was_skipped(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(
        "spectrain_ext.tools.metrics.progress_bar.perf_counter", itertools.count().__next__
    )
    data, more = batches(3, size=4), {"clip_norm": 1.0, "passes": [st.passes.CheckFinite("skip")]}
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, "pipedream", **more)
    pipe.fit([*data, poisoned(data[0], "input")], progress=True)
    assert pipe.skipped == (1, 1)
    last = terminal.getvalue().rpartition("norm ")[2].split()[0]
    assert 0 < float(last) < math.inf


def test_a_run_that_nobody_began_is_told(tmp_path):
    pipe, data = st.Pipeline(tanh_stages(2), sgd(), mse), batches(3)
    manager = st.checkpoint.CheckpointManager(tmp_path, pipe)
    for call in (manager.run, pipe.run):
        match = r"nothing was trained; iterate over it, or call fit\(\)"
        with pytest.warns(UserWarning, match=match) as told:
            call(data)
        assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = pipe.run(data)
        next(run)
        run.close()
        for _ in pipe.run(data):
            break
        pipe.fit(data)
        del run
        gc.collect()


# Modules that are left in evaluation mode


FIRST = Function(lambda pair: pair[0])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5)

    def forward(self, x):
        return x + self.last(self.drop(self.first(x)))


def block():
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(block().eval(), nn.Linear(5, 5)), "0"),  # as from_pretrained's
        (lambda: nn.Sequential(Residual().eval()), "0"),
        (lambda: nn.Sequential(nn.LSTM(5, 5, 2, dropout=0.1).eval(), FIRST), "0"),
        # on purpose: fixed statistics, and a frozen part
        (lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).eval()), None),
        (lambda: nn.Sequential(block().requires_grad_(False).eval(), nn.Linear(5, 5)), None),
    ],
)
def test_a_part_of_a_stage_in_evaluation_mode_is_warned_of_if_it_trains(make, name):
    pipe = st.Pipeline([nn.Linear(5, 5), make()], sgd(), mse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.fit(batches(2))
        pipe.fit(batches(2))  # says it no more
    assert len(caught) == (name is not None)
    said = f"run: stages[1]: {name!r} is in evaluation mode"
    assert all(said in str(warning.message) for warning in caught)


def test_a_whole_stage_in_evaluation_mode_is_warned_of():
    model = Residual().eval()
    pipe = st.Pipeline(st.partition(model, 2, torch.randn(4, 5)), sgd(), mse)
    model.train()  # does not reach the traced stages
    with pytest.warns(UserWarning, match=r"run: stages\[0\] is in evaluation mode.*train\(\) of"):
        pipe.fit(batches(2))
