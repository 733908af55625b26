"""Tests what a rank reads of others: inner, because no rank of this version writes bad entries."""

from __future__ import annotations

import json
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
import torch.distributed as dist
from helpers.ranks import Ranks, free_port, run_ranks
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import spectrain_ext as st
from spectrain_ext.distributed import board as boards
from spectrain_ext.distributed.board import FAILED, Board
from spectrain_ext.distributed.failures import WATCHING, Heartbeat, find_culprit
from spectrain_ext.distributed.store import connection, own_store, store_at


def test_a_connection_is_not_waited_for_as_long_as_the_store_says():
    class Asked:
        timeout = timedelta(minutes=30)

        def set_timeout(self, timeout):
            self.timeout = timeout

        def clone(self):
            found = Asked()
            found.tried = self.timeout
            return found

    store = Asked()
    made = connection(store, patience=1.0, timeout=80.0)
    assert (made.tried.seconds, made.timeout.seconds) == (40, 1)
    assert store.timeout == timedelta(minutes=30)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return store_at("127.0.0.1", 0, listen=True)


def test_a_store_of_its_own_has_what_others_are_told(kept):
    board = Board(kept, 0, 1, timeout=5.0, kept_elsewhere=True)
    with board.run(starts=True):
        assert board.exchange_json("meeting", 1) == [1]
    assert kept.get("beat/0") == b"in another store"
    with pytest.raises(RuntimeError, match="the process group's store has outlived a restart"):
        Board(kept, 0, 1, timeout=5.0, kept_elsewhere=True)


def test_a_store_of_its_own_that_cannot_be_reached(kept, monkeypatch):
    kept.set("store", json.dumps(["127.0.0.1", free_port()]))
    monkeypatch.setattr(boards, "CONNECT_SECONDS", 1.0)
    told = (
        "rank 0, last known in starting: (the store that it keeps does not|its process has ended)"
    )
    with pytest.raises(st.RankError, match=f"first cause: {told}"):
        Board(kept, 1, 2, timeout=1.0, kept_elsewhere=True)


def test_a_store_without_an_address_stays_the_only_one():
    store = PrefixStore("pipeline", dist.HashStore())
    assert own_store(store, keeps=True, until=0.0) == (None, None)
    assert own_store(store, keeps=False, until=monotonic() + 5.0) == (None, None)


def test_a_board_of_one_rank(kept, tmp_path):
    board = Board(kept, 0, 1, timeout=5.0)
    with board.run(starts=True):
        for n in range(3):
            assert board.exchange_json("meeting", {"own": n}) == [{"own": n}]
    for _ in range(3):
        with board.run():
            pass
    with pytest.raises(ArithmeticError), board.run():
        raise ArithmeticError("planned")
    assert board.cause[:2] == (0, "beginning a run: ArithmeticError: planned")
    for thread in threading.enumerate():
        if thread.name in WATCHING:  # they may still be writing the report
            thread.join()
    # multiprocessing may make a directory here as well, when this process first uses it
    (report,) = tmp_path.glob("spectrain-failure-*")
    assert "ArithmeticError: planned" in report.read_text()
    assert report.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError, match="an earlier run"), board.run():
        pass


BEAT = {
    **{"doing": "F 1", "busy": 0.5, "waits": [0, "edge"], "shared": 0, "last": []},
    **{"knows": False, "process": ["host", 1, 2]},
}


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("beat/1", "{"),
        ("beat/1", "\udcff"),
        ("beat/1", json.dumps([*(BEAT | {"more": 1}).values()])),
        (FAILED, "[9]"),
    ],
)
def test_an_entry_that_no_rank_writes_ends_the_run(kept, key, entry):
    board = Board(kept, 0, 2, timeout=5.0, grace=0.5)
    kept.set(key, entry.encode("utf-8", "surrogateescape"))
    match = "the store has an entry that no rank of this version writes"
    with pytest.raises(st.RankError, match=match), board.run(starts=True):
        board.exchange_json("meeting", 1)


def test_a_report_is_not_written_under_a_name_from_the_store(kept, tmp_path):
    (tmp_path / "mine").write_text("mine")
    board = Board(kept, 0, 2, timeout=5.0, grace=0.5)
    kept.set("beat/1", json.dumps([*BEAT.values()]))
    kept.set(FAILED, json.dumps([1, "planned", "/../mine", False]))
    with pytest.raises(st.RankError, match="planned") as raised, board.run(starts=True):
        board.exchange_json("meeting", 1)
    assert (tmp_path / "mine").read_text() == "mine"
    text = Path(raised.value.report).read_text()
    assert "First cause: rank 1, planned" in text
    assert "  1  F 1, for " in text


def wait_for_one(rank, ranks, grace, seconds):
    """Let rank 0 work alone in steps of ``seconds`` (None: endless) while the others wait."""
    told = Board(dist.PrefixStore("test", _get_default_store()), rank, ranks, 1.0, grace)
    with told.run(starts=True):
        pass
    with told.together("the work of one"):
        if rank == 0:
            with told.busy("the work"):
                for n, each in enumerate(seconds):
                    told.set_doing("step", n)
                    threading.Event().wait(each)


@pytest.mark.processes
def test_a_rank_that_gets_on_is_waited_for_beyond_the_deadline_and_no_other():
    run_ranks(wait_for_one, 3, 3.0, [0.3] * 9)
    began = monotonic()
    ends = Ranks(wait_for_one, 3, 2.0, [0.3] * 6 + [None]).join()
    assert [end.code for end in ends] == [1, 1, 1]
    for end in ends[1:]:
        assert "first cause: rank 0, step 6: busy with it for 1." in end.error
    # 1.8 s of steps, the deadline, the grace of the stuck rank, and starting processes
    assert monotonic() - began < 30


def test_blame_goes_to_whom_all_others_wait_for():
    now = monotonic()
    waiting = [Heartbeat(b"x", now, doing=f"F {r}", waits=(r - 1, "edge")) for r in range(4)]
    busy = [Heartbeat(b"x", now, doing="F 9", busy=3.0), *waiting[1:]]
    assert find_culprit(busy, 3, 2, 1.0)[0].rank == 0
    silent = [busy[0], Heartbeat(b"x", now - 2.0, doing="B 1"), *busy[2:]]
    cause, _ = find_culprit(silent, 3, 2, 1.0)
    assert cause.rank == 1
    assert "last known in B 1: no sign of life for 2.0 s" in cause.reason
    circle = [Heartbeat(b"x", now, waits=(2, "edge")), *waiting[1:]]
    assert "3 -> 2 -> 1 -> 0 -> 2" in find_culprit(circle, 3, 2, 1.0)[0].reason
    pair = [Heartbeat(b"x", now, waits=(1, "edge 1 -> 0")), waiting[1]]
    assert find_culprit(pair, 1, 0, 1.0)[0].rank == 0
