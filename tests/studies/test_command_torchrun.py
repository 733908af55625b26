"""Tests ``python -m studies train`` over processes: in-process results, each message once."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers import cli_programs
from helpers.ranks import Ranks, free_port, run_ranks

from studies.__main__ import main
from studies.options import OptionError
from studies.settings import settle
from studies.world import World

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.processes

FAST = ("--batch-size", "256", "--epochs", "1", "--seeds", "1", "--width", "8")
# without values that depend on the clock
_EQUAL = ("test_accuracy", "test_loss", "perplexity", "weight_version_bytes")


def _document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def _expect_same_results(found: Path, expected: Path) -> None:
    ours, theirs = _document(found)["methods"], _document(expected)["methods"]
    assert [entry["method"] for entry in ours] == [entry["method"] for entry in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert {key: a[key] for key in _EQUAL} == {key: b[key] for key in _EQUAL}
        for ran, alone in zip(a["seeds"], b["seeds"], strict=True):
            assert ran["train_losses"] == alone["train_losses"]


def _alone(folder: Path, *arguments: str) -> None:
    with cli_programs.undrawn():
        done = CliRunner().invoke(main, ["train", *arguments, "--out", str(folder)])
    assert done.exit_code == 0, done.output


def test_torchrun_gives_the_results_of_one_process(tmp_path: Path) -> None:
    """Uses the installed package, because the checkout's sources are not compiled in place."""
    methods = (*FAST, "-m", "spectrain,pipedream,xgrad")
    together = tmp_path / "together"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("-m", "studies", "train", *methods, "--out", str(together)),
    ]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for once in ("Same initial weights", "2 processes, a stage each", "numbers: "):
        assert text.count(once) == 1, done.stdout
    _alone(tmp_path / "alone", *methods, "--stages", "2")
    _expect_same_results(together, tmp_path / "alone")
    assert {path.name for path in together.iterdir()} == {
        path.name for path in (tmp_path / "alone").iterdir()
    }
    settings = _document(together)["settings"]
    assert (settings["stages"], settings["processes"]) == (2, 2)
    assert {path.name for path in (together / "timelines").iterdir()} == {
        "spectrain.png",
        "pipedream.png",
    }


def test_all_methods_and_several_seeds_with_uneven_microbatches_and_clipping(
    tmp_path: Path,
) -> None:
    arguments = (*FAST[:4], "--width", "8", "--seed", "5", "--seed", "1", "-m", "sync,1f1b,xpipe")
    arguments += ("--microbatches", "2", "--clip-norm", "0.5", "--lr-schedule", "cosine")
    together = tmp_path / "together"
    ends = run_ranks(cli_programs.train, 3, free_port(), *arguments, "--out", str(together))
    assert [code for code, _ in ends] == [0, 0, 0]
    assert [output for _, output in ends[1:]] == ["", ""]
    _alone(tmp_path / "alone", *arguments, "--stages", "3")
    _expect_same_results(together, tmp_path / "alone")
    # again: all ranks find every run
    again = run_ranks(cli_programs.train, 3, free_port(), *arguments, "--out", str(together))
    assert "6 of 6 runs were finished before" in " ".join(again[0][1].split())
    # a run of one process has another throughput and does not count as one of three
    with cli_programs.undrawn():
        one = CliRunner().invoke(
            main, ["train", *arguments, "--stages", "3", "--out", str(together), "--seed", "5"]
        )
    assert "finished before" not in one.output


def test_replicas_share_the_microbatches_of_their_stage(tmp_path: Path) -> None:
    arguments = (*FAST, "-m", "sync,spectrain,xgrad", "--clip-norm", "0.5", "--microbatches", "2")
    together = tmp_path / "together"
    more = ("--replicas", "1,2", "--metrics", "--out", str(together))
    ends = run_ranks(cli_programs.train, 3, free_port(), *arguments, *more)
    assert [code for code, _ in ends] == [0, 0, 0]
    assert [output for _, output in ends[1:]] == ["", ""]
    text = " ".join(ends[0][1].split())
    assert "3 processes, 1 + 2 for the stages" in text
    settings = _document(together)["settings"]
    assert (settings["stages"], settings["replicas"]) == (2, [1, 2])
    # The last method has no stages; rank 0 trains it alone.
    names = {*(f"metrics-rank{rank}.jsonl" for rank in range(3)), "metrics.jsonl"}
    assert {path.name for path in together.glob("metrics*")} == names
    # Without delays, replicas only change the order of sums.
    _alone(tmp_path / "alone", *arguments, "--stages", "2")
    ours, theirs = (_document(each)["methods"] for each in (together, tmp_path / "alone"))
    for found, expected in zip(ours, theirs, strict=True):
        a, b = (entry["seeds"][0]["train_losses"] for entry in (found, expected))
        assert len(a) == len(b) > 3
        assert a == pytest.approx(b, rel=1e-5 if found["method"] == "sync" else 0.5)
    assert ours[2]["seeds"][0]["train_losses"] == theirs[2]["seeds"][0]["train_losses"]


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        (None, 3, None),
        (1, 3, None),
        ((1, 1), 2, None),
        (2, 4, (2, 2)),
        ((1, 2, 1), 4, (1, 2, 1)),
    ],
)
def test_replicas_are_as_many_as_processes(given, processes, expected) -> None:
    settings = settle({"replicas": given}, World(0, processes))
    assert settings.replicas == expected
    assert settings.stages == len(expected or range(processes))


@pytest.mark.parametrize(
    ("given", "processes", "said"),
    [
        (2, 3, "2 for every stage do not divide 3 ranks"),
        (2, 1, "do not divide 1 ranks; torchrun starts more"),
        ((1, 2), 1, "are 3 ranks in all, and there are 1; torchrun starts more"),
        (0, 3, "at least 1"),
    ],
)
def test_replicas_that_cannot_be(given: Any, processes: int, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        settle({"replicas": given}, World(0, processes))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("1,x", "expected a number from 1 to 100000, or one per stage with commas, got '1,x'"),
        ("", "expected a number from 1 to 100000, or one per stage with commas, got ''"),
        ("0", "expected a number from 1 to 100000, or one per stage with commas, got '0'"),
        ("2", "2 for every stage do not divide 1 ranks; torchrun starts more"),
        ("1,2", "[1, 2] are 3 ranks in all, and there are 1; torchrun starts more"),
    ],
)
def test_replicas_that_cannot_be_typed(given: str, said: str) -> None:
    done = CliRunner().invoke(main, ["train", "--replicas", given])
    assert done.exit_code == 2
    assert f"Invalid value for '--replicas': {said}" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--replicas", "2", "--stages", "2"), 2, "expected 1, for 2 processes and --replicas 2"),
        (
            ("--replicas", "2", "--microbatches", "3"),
            1,
            "method sync: replicas: stage 0 has 2, which must divide the 3 microbatches",
        ),
        (("--stages", "3"), 2, "--stages': expected 2, one for each process that torchrun started"),
        (("--lr", "nan"), 2, "expected a finite number"),
        (("--data", "text", "--data-dir", "/dev/null"), 1, "/dev/null"),
        (("--out", __file__), 2, "--out"),
    ],
    ids=["replicas", "microbatches", "stages", "parser", "data", "out"],
)
def test_an_error_of_all_is_told_once(
    arguments: tuple[str, ...], code: int, expected: str, tmp_path: Path
) -> None:
    given = (*FAST, "-m", "sync", "--out", str(tmp_path / "out"), *arguments)
    ends = run_ranks(cli_programs.train, 2, free_port(), *given)
    assert [end[0] for end in ends] == [code, code]
    assert expected in " ".join(ends[0][1].split())
    assert ends[1][1] == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_ends_all_ranks_and_is_told_by_the_rank_and_by_one_more(
    culprit: int, tmp_path: Path
) -> None:
    given = (*FAST, "-m", "spectrain", "--out", str(tmp_path))
    ends = Ranks(cli_programs.train_failing, 3, free_port(), culprit, *given).join()
    assert [end.code for end in ends] == [1, 1, 1]
    told = [end.error.rpartition("cli_programs.Told: ")[2] for end in ends]
    reporter, silent = (1, 2) if culprit == 0 else (0, 2)
    assert f"Error: stage {culprit}, minibatch 3, forward" in told[culprit]
    cause = f"first cause: rank {culprit}, forward of minibatch 3 microbatch 0: stage {culprit}"
    assert cause in told[reporter]
    assert "ArithmeticError: planned" in told[reporter]
    assert told[silent].strip() == "(1, '')"
    assert not (tmp_path / "results.json").exists()


def test_what_ranks_tell_each_other() -> None:
    found = run_ranks(cli_programs.talk, 3, free_port())
    for heard in found:
        assert heard["told"][:2] == ["", "ä"]
        assert heard["told"][2][0] == 0.1
        assert math.isnan(heard["told"][2][1])
    own = [stage[0] for stage in found[0]["state"]]
    assert own == [6.0, 12.0, 18.0]  # a 3 x 2 weight of ones, of twos, of threes


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((None, None, None), [None, None, None]),
        (("a", "a", "a"), [("a", 2), ("", 2), ("", 2)]),
        ((None, "a", "a"), [("", 1), ("rank 1: a", 2), ("", 2)]),
        (("a", None, "b"), [("rank 0: a", 2), ("", 1), ("rank 2: b", 2)]),
    ],
    ids=["fine", "all", "some", "two"],
)
def test_every_reason_is_told_once(texts: tuple[str | None, ...], expected: list[Any]) -> None:
    assert run_ranks(cli_programs.complain, 3, texts) == expected


def test_it_listens_on_loopback_only() -> None:
    for rank, found in enumerate(run_ranks(cli_programs.where_it_listens, 2, free_port())):
        assert set(found) <= {"127.0.0.1", "::1"}
        assert len(found) >= (2 if rank == 0 else 1)  # the store, and gloo


def test_a_rank_that_is_gone_ends_those_that_wait_for_it() -> None:
    ends = Ranks(cli_programs.talk_to_nobody, 2).join()
    assert ends[1].code == 7
    assert ends[0].value == 1


def test_a_stage_that_is_gone_is_named_by_all_that_collect() -> None:
    ends = Ranks(cli_programs.collect_from_nobody, 3, free_port()).join()
    assert ends[2].code == 7
    for end in ends[:2]:
        assert end.code == 1
        assert "first cause: rank 2" in end.error
        assert "RankError: rank" in end.error


def test_a_failure_of_the_rank_that_works_alone_ends_the_others() -> None:
    ends = Ranks(cli_programs.wait_for_the_first, 3, free_port()).join()
    assert [end.code for end in ends] == [1, 1, 1]
    assert "ArithmeticError: planned" in ends[0].error
    for end in ends[1:]:
        assert "ConnectionError: the processes have lost one another" in end.error


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (0, 1, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
    ],
    ids=["none", "half", "one", "four"],
)
def test_the_world_is_torchruns(
    environment: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(environment) == 3:
        environment = {**environment, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    world = World.of_environment(environment)
    assert (world.rank, world.size, world.local_rank) == expected
    for gpus, number in ((0, 1), (2, 1), (1, 0)):  # several ranks may share one
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert world.device("cuda") == (f"cuda:{number}" if world.together else "cuda")
    assert world.device("cuda:3") == "cuda:3"
