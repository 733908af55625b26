"""Tests CSV files: round trips, torch's own schedules, and invalid files."""

from __future__ import annotations

import pytest
from helpers.schedules import classic, finite, runs
from hypothesis import given

from spectrain_ext.schedule import ScheduleError
from spectrain_ext.simulation import read_csv, streams, validate
from spectrain_ext.simulation import write_csv as write


@given(run=runs(5, most=6))
def test_round_trip(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    sizes = {"microbatches": run.microbatches}
    write(path, run.finite(), **sizes)
    assert read_csv(path, **sizes) == run.finite()
    text = path.read_bytes()
    write(path, run.streams(), **sizes, minibatches=run.minibatches)
    assert path.read_bytes() == text


def given_file(tmp_path, text):
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    return path


def exported(name, n, m, path):
    """Return torch's own CSV of its schedule with this name."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    single = getattr(torch_schedules, name)
    if not hasattr(single, "_get_pipeline_order"):
        pytest.skip("this torch does not export its single-stage schedules")
    schedule = object.__new__(single)
    schedule._num_stages, schedule._n_microbatches = n, m
    exporting = object.__new__(torch_schedules.PipelineScheduleMulti)
    exporting.pipeline_order = schedule._get_pipeline_order()
    exporting._dump_csv(path)
    return path


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_what_torch_exports(n, tmp_path):
    """torch 2.13 counts the last stage's forwards from 1 in 1F1B, which cannot run: an error."""
    path = exported("ScheduleGPipe", n, 2 * n, tmp_path / "schedule.csv")
    assert read_csv(path) == finite("gpipe", [2 * n] * n, 1, 2 * n)
    assert len(validate(read_csv(path, microbatches=2), microbatches=2)) == n
    path = exported("Schedule1F1B", n, 2 * n, tmp_path / "schedule.csv")
    rows = path.read_text().splitlines()
    cells = rows[-1].split(",")
    if f"{n - 1}F0" not in cells:
        with pytest.raises(ScheduleError, match=f"stage {n - 1}, "):
            read_csv(path)
        for number in range(2 * n):
            cells[cells.index(f"{n - 1}F{number + 1}")] = f"{n - 1}F{number}"
        path.write_text("\n".join([*rows[:-1], ",".join(cells)]))
    assert read_csv(path) == finite("1f1b", classic(n), 1, 2 * n)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_torch_takes_ours(name, tmp_path):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    n, m = 3, 5
    path = tmp_path / "schedule.csv"
    write(path, streams(name, classic(n), m), microbatches=m, minibatches=1)
    loading = object.__new__(torch_schedules.PipelineScheduleMulti)
    loading.pipeline_order, loading._stages = {}, []
    loading.pp_group_size, loading._num_stages, loading._n_microbatches = n, n, m
    loading._load_csv(path)
    assert loading.stage_index_to_group_rank == {k: k for k in range(n)}
    assert [str(cell) for cell in loading.pipeline_order[2][:2]] == [
        "2F0",
        "2F1" if name == "gpipe" else "2B0",
    ]


@pytest.mark.parametrize(
    ("text", "name", "windows", "microbatches"),
    [
        # idle cells, and those of data parallelism
        (
            "0UNSHARD,0F0,0WAIT_SEND_F0,,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n,1F0,1B0,,\n",
            *("gpipe", [1, 1], 1),
        ),
        # Communication follows from the compute actions; its order belongs to the file's schedule.
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n",
            *("1f1b", [2, 1], 2),
        ),
        ("", "1f1b", [], 1),
    ],
)
def test_what_is_no_computation_is_left_out(tmp_path, text, name, windows, microbatches):
    assert read_csv(given_file(tmp_path, text)) == finite(name, windows, 1, microbatches)


def test_backwards_in_halves_are_exchanged_with_torch(tmp_path):
    """torch's I and W; one row may have halves and the other whole backwards."""
    assert read_csv(given_file(tmp_path, "0F0,0I0,0W0\n1F0,1B0\n")) == [
        finite("zb-h1", [1, 1], 1)[0],
        finite("gpipe", [1, 1], 1)[1],
    ]
    write(tmp_path / "written.csv", streams("zb-h1", [2, 2], 3), microbatches=3, minibatches=1)
    text = (tmp_path / "written.csv").read_text().split()
    assert text == ["0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2", "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n", "stage 1, receive activation of minibatch 0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "stage 0, receive gradient of minibatch 0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "stage 0, receive gradient of minibatch 0, microbatch 1"),
        ("0B0,0F0\n", "backward of minibatch 0, microbatch 0: expected its forward"),
        ("0F0,0W0,0I0\n", "backward of the weights of minibatch 0, microbatch 0: expected"),
        ("0F0,0I0,0I0,0W0\n", "backward of the input of minibatch 0, microbatch 0: expected"),
        ("0F0,0I0,0B0\n", "backward of minibatch 0, microbatch 0: expected backward of the w"),
        ("0F0,0F0,0B0\n", "stage 0, forward of minibatch 0, microbatch 0: expected once"),
    ],
)
def test_schedules_that_cannot_be_run(tmp_path, text, expected):
    with pytest.raises(ScheduleError, match=expected):
        read_csv(given_file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "microbatches", "expected"),
    [
        ("0F0,0X1\n", None, "row 0, column 1: expected a forward or a backward, got '0X1'"),
        ("0F0,0B\n", None, "row 0, column 1: expected a forward or a backward, got '0B'"),
        ("0F0,hello\n", None, "row 0, column 1: expected a cell like 0F0, got 'hello'"),
        ("0F0,2F0\n1F0\n", None, "row 0, column 1: expected stage 0 only, as in 0F0, got '2F0'"),
        ("0F0,0B0\n", 0, "microbatches: expected at least 1, got 0"),
    ],
)
def test_files_that_are_not_understood(tmp_path, text, microbatches, expected):
    with pytest.raises(ValueError, match=expected):
        read_csv(given_file(tmp_path, text), microbatches=microbatches)
