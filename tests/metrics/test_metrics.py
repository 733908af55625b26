"""Tests metrics: correct numbers, unchanged training, complete files."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from helpers.pipeline_cases import sgd
from helpers.random_modules import Function
from helpers.rank_cases import Case
from helpers.ranks import run_ranks
from torch import nn

import spectrain_ext as st

COMPARED = ["spectrain", "pipedream", "vanilla", "gpipe", "second-order", "pipedream-2bw", "zb-h1"]


def pipeline(method="spectrain", n=3, **settings):
    torch.manual_seed(2)
    stages = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1)) for _ in range(n)]
    return st.Pipeline(stages, sgd(), nn.functional.mse_loss, method, **settings)


def batches(count, size=6):
    g = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, size, 5, generator=g)) for _ in range(count)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(pipe, path, data, **more):
    """Train under metrics; return their records."""
    with st.Metrics(pipe, path, **more) as metrics:
        list(pipe.run(data, trace=metrics))
    return lines(path)


@pytest.mark.parametrize("method", COMPARED)
def test_observation_changes_no_bit(method, tmp_path):
    parts, found = 3 if method in ("gpipe", "pipedream-2bw") else 1, []
    for watched in (False, True):
        pipe = pipeline(method, microbatches=parts)
        metrics = st.Metrics(pipe, tmp_path / "m", every=4, errors_every=3)
        trace = [metrics, st.Trace()] if watched else None
        losses = [result.loss for result in pipe.run(batches(12), trace=trace)]
        found.append([*losses, *pipe.parameters()])
    assert all(map(torch.equal, *found))


def test_every_record_has_every_key_and_the_counts_are_right(tmp_path):
    pipe = pipeline()
    path = tmp_path / "below" / "m.jsonl"
    pipe.minibatches = 100  # as from a checkpoint
    with st.Metrics(pipe, path, every=10, errors_every=5) as m:
        losses = [result.loss.item() for result in pipe.run(batches(25), trace=m)]
    found = lines(path)
    assert len(found) == 9  # 10, 10 and 5 minibatches of three stages
    for stage in range(3):
        mine = [record for record in found if record["stage"] == stage]
        assert [record["minibatch"] for record in mine] == [110, 120, 125]
        assert [record["minibatches"] for record in mine] == [10, 10, 5]
        for record in mine:
            kinds = {"predict", "forward", "loss", "backward", "update", "send"}
            assert set(record["busy"]) <= kinds
            assert 0 <= record["bubble"] < 1
            spent = sum(record["busy"].values())
            assert record["bubble"] == pytest.approx(1 - spent / record["seconds"])
            rate = record["minibatches"] / record["seconds"]
            assert record["minibatches_per_second"] == pytest.approx(rate)
            assert record["lr"] == [0.05]
            assert (record["loss"] is None) == (stage != 2)
        # stage 0 is 2 forwards ahead: their samples are in its first window
        samples = [round(record["samples_per_second"] * record["seconds"]) for record in mine]
        assert sum(samples) == 25 * 6
        assert samples[0] == 6 * (10 + 2 - stage)
        # and so are its activations, each of 6 x 5 float32
        sent = [[record["bytes_sent"][to] for record in mine] for to in ("next", "previous")]
        activations = [120 * (stage < 2) * count for count in (12 - stage, 10, 3 + stage)]
        assert sent == [activations, [120 * (stage > 0) * count for count in (10, 10, 5)]]
    mean = [record["loss"] for record in found if record["stage"] == 2]
    expected = [losses[:10], losses[10:20], losses[20:]]
    assert mean == pytest.approx([sum(part) / len(part) for part in expected])


@pytest.mark.parametrize("parts", [1, 2])
def test_samples_are_not_the_rows_of_a_table(tmp_path, parts):
    """Not of one in the batch, whole or not to be cut, and not of one that a stage passes on."""
    data = [((torch.randn(40, 5), x), y) for x, y in batches(6)]
    cut = [st.Microbatches([pair, pair][:parts]) for pair in data]
    rows = [(data, 6, ((None, 0), 0)), (cut, 6 * parts, ((None, 0), 0))]
    for n, (given, samples, split_dim) in enumerate(rows + [(data, 6, 0)] * (parts == 1)):
        first = Function(lambda v, linear: (v[0], linear(v[1])), nn.Linear(5, 5))
        last = Function(lambda v, linear: linear(v[1]) + v[0][: len(v[1])], nn.Linear(5, 5))
        more = {"microbatches": parts, "split_dim": split_dim}
        pipe = st.Pipeline([first, last], sgd(), nn.functional.mse_loss, "vanilla", **more)
        for record in measured(pipe, tmp_path / f"{n}", given, every=6):
            assert round(record["samples_per_second"] * record["seconds"]) == 6 * samples


def test_staleness_is_what_the_schedule_says_once_the_pipeline_is_full(tmp_path):
    pipe = pipeline("vanilla", n=4)
    for record in measured(pipe, tmp_path / "m", batches(20), every=10):
        steady = 3 - record["stage"]
        staleness = record["staleness"]
        assert staleness["scheduled"] == staleness["max"] == steady
        if record["minibatch"] == 10:  # minibatch i of the first ones: min(i, steady)
            expected = sum(min(i, steady) for i in range(10)) / 10
            assert staleness["mean"] == pytest.approx(expected)
        else:
            assert staleness["mean"] == steady


@pytest.mark.parametrize(("n", "k", "horizon"), [(2, 0, 1), (5, 3, 2)])
def test_prediction_errors_are_those_of_the_weights_themselves(n, k, horizon, tmp_path):
    """Compared with weights copied by the test's own hooks; both stages are late by 1 update."""
    pipe = pipeline(n=n)
    stage = list(pipe.children())[k]
    computed = []
    stage.register_forward_pre_hook(
        lambda *_: computed.append([p.detach().clone() for p in stage.parameters()])
    )
    found = {
        record["minibatch"]: (record["prediction_error"], record["staleness_error"])
        for record in measured(pipe, tmp_path / "m", batches(12), every=1, errors_every=4)
        if record["stage"] == k and record["prediction_error"] is not None
    }
    # the forward of minibatch 4 follows 3 updates, and predicts from there; so does that of 8
    assert set(found) == {horizon, 3 + horizon, 7 + horizon}
    for i in (4, 8):
        aim = after_updates(n, k, i - 1 + horizon)
        norm = flat(aim).norm()
        expected = (
            (flat(computed[i]) - flat(aim)).norm() / norm,
            (flat(after_updates(n, k, i - 1)) - flat(aim)).norm() / norm,
        )
        measured_then = found[i - 1 + horizon]
        assert measured_then == pytest.approx([value.item() for value in expected], rel=1e-4)
        assert measured_then[0] != measured_then[1]


def after_updates(n, k, count):
    """Return stage k's true weights after ``count`` updates of the same run."""
    pipe = pipeline(n=n)
    list(pipe.run(batches(12)[:count]))
    return list(list(pipe.children())[k].parameters())


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def test_a_stage_without_parameters_has_records_too_and_what_is_not_finite_is_null(tmp_path):
    stages = [nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)]
    pipe = st.Pipeline(stages, sgd(), nn.functional.mse_loss, "vanilla")
    data = [(x, torch.inf * y) for x, y in batches(4)]
    found = measured(pipe, tmp_path / "m", data, every=4)
    assert [record["minibatches"] for record in found] == [4] * 3
    assert found[1]["lr"] is found[1]["staleness_error"] is found[2]["loss"] is None


def test_a_failed_run_leaves_what_was_measured_and_the_next_one_goes_on(tmp_path):
    pipe = pipeline("vanilla")
    wrong = [*batches(7), (torch.zeros(6, 5), torch.zeros(6, 4, 3))]
    with st.Metrics(pipe, tmp_path / "m", every=5) as metrics:
        with pytest.raises(st.StageError):
            list(pipe.run(wrong, trace=metrics))
        list(pipe.run(batches(5), trace=metrics))
    last = [record for record in lines(tmp_path / "m") if record["stage"] == 2]
    assert [record["minibatch"] for record in last] == [5, 7, 12]


def test_lines_stay_whole_after_a_crash_in_the_middle_of_one(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"stage": 0}\n{"stage": 1, "ti')
    pipe = pipeline("sync", n=1)
    with st.Metrics(pipe, path) as metrics:
        list(pipe.run(batches(2), trace=metrics))
    first, torn, new = path.read_text().splitlines()
    assert torn.endswith('"ti')
    assert json.loads(new)["minibatches"] == 2
    assert json.loads(first) == {"stage": 0}


def test_a_function_gets_the_same_records(tmp_path):
    told = []
    assert measured(pipeline(), tmp_path / "m", batches(10), every=5, write=told.append) == told
    with st.Metrics(pipeline(), write=told.append) as metrics:
        list(metrics._pipe.run(batches(2), trace=metrics))
    assert len(told) == 9


def test_bad_arguments(tmp_path):
    for more, expected in (
        ({"every": 0}, "every: expected at least 1, got 0"),
        ({"errors_every": 0}, "errors_every: expected at least 1, got 0"),
        ({"path": None}, "path: expected a file, or a function as write, got neither"),
    ):
        with pytest.raises(ValueError, match=expected):
            st.Metrics(pipeline(), **{"path": tmp_path / "m", **more})


def measured_on_ranks(rank, ranks, path):
    case = Case("vanilla", (ranks, 1))
    pipe = case.pipeline(rank)
    with st.Metrics(pipe, path, every=4) as metrics:
        for _ in pipe.run(case.batches([8] * 9), trace=metrics):
            pass


@pytest.mark.processes
def test_every_rank_writes_its_own_file(tmp_path):
    run_ranks(measured_on_ranks, 2, str(tmp_path / "m.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == {"m-rank0.jsonl", "m-rank1.jsonl"}
    for rank in range(2):
        found = lines(tmp_path / f"m-rank{rank}.jsonl")
        assert [record["minibatch"] for record in found] == [4, 8, 9]
        assert {(record["rank"], record["stage"]) for record in found} == {(rank, rank)}
        assert all((record["loss"] is None) == (rank == 0) for record in found)
        assert {record["staleness"]["scheduled"] for record in found} == {1 - rank}


def test_the_log_has_a_line_per_event_and_nothing_is_printed(caplog, capfd):
    pipe = pipeline("vanilla")
    with caplog.at_level(logging.INFO, "spectrain_ext"):
        list(pipe.run(batches(3)))
        run = pipe.run(batches(3))
        next(run)
        run.close()
        with pytest.raises(st.StageError):
            list(pipe.run([(torch.zeros(6, 5), torch.zeros(6, 4, 3))]))
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    begins = ("INFO", "run begins: vanilla, stages 0 to 2 of 3")
    ended = ("INFO", "run ended: stages 0 to 2 of 3")
    left = ("INFO", "run ended, left by the caller: stages 0 to 2 of 3")
    assert told[:5] == [begins, ended, begins, left, begins]
    assert told[5][0] == "ERROR"
    assert told[5][1].startswith("run failed: StageError: stage 2, minibatch 0, loss")
    assert all(record.name.startswith("spectrain_ext.") for record in caplog.records)
    assert capfd.readouterr() == ("", "")  # not even of a failure


def test_a_checkpoint_manager_lets_metrics_look_on_and_logs_what_it_does(tmp_path, caplog):
    pipe = pipeline("vanilla")
    manager = st.checkpoint.CheckpointManager(tmp_path / "c", pipe, every_minibatches=4, keep=1)
    with caplog.at_level(logging.INFO, "spectrain_ext.checkpoint"):
        assert manager.restore() is None
        with st.Metrics(pipe, tmp_path / "m", every=3) as metrics:
            list(manager.run(batches(9), trace=metrics))
        assert manager.restore() is not None
    last = [record for record in lines(tmp_path / "m") if record["stage"] == 2]
    assert [record["minibatch"] for record in last] == [3, 4, 7, 8, 9]
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint {what}: {tmp_path / 'c' / f'minibatch-0000000{n}'}"
        for what, n in (("saved", 4), ("saved", 8), ("removed", 4), ("loaded", 8))
    ]
