"""Tests the process group's store, which must listen only at its given address."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from helpers import rank_programs
from helpers.cli_programs import listening
from helpers.ranks import run_ranks

from spectrain_ext.distributed import failures, join_ranks
from spectrain_ext.distributed import store as store_module
from spectrain_ext.distributed.board import FAILED, Board
from spectrain_ext.distributed.failures import (
    WATCHING,
    Cause,
    Heartbeat,
    new_report,
    part_of,
    place_of,
)
from spectrain_ext.distributed.store import connection, store_at
from spectrain_ext.errors import RankError


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_it_listens_on_the_address_alone(address):
    before = listening()
    kept = store_at(address, 0, listen=True)
    found = listening()
    for other in before:
        found.remove(other)
    (where,) = found
    assert where in ({"127.0.0.1", "::1"} if address == "localhost" else {address})
    joined = store_at(address, kept.port, listen=False)
    joined.set("key", "value")
    assert kept.get("key") == b"value"
    assert kept.clone().get("key") == b"value"
    for elsewhere in {"127.0.0.3"} - {address}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, kept.port), timeout=5.0)


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


def test_a_board_of_one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = store_at("127.0.0.1", 0, listen=True)
    board = Board(kept, 0, 1, timeout=5.0)
    with board.run(starts=True):
        for n in range(3):
            assert board.exchange_json("meeting", {"method": "sync", "own": n}) == [
                {"method": "sync", "own": n}
            ]
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
    **{"doing": "F 1", "busy": 0.5, "waits": [0, "edge"], "words": 0, "last": [], "complete": 0},
    **{"knows": False, "reported": False, "process": ["host", 1, 2]},
}


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        *(("beat/1", entry) for entry in ("{", "[1, 2]", "\udcff", "[" * 5000, "{}", "null")),
        *(
            ("beat/1", json.dumps([*(BEAT | changed).values()]))
            for changed in (
                {"waits": [2, "edge"]},
                {"waits": [0]},
                {"busy": "long"},
                {"words": None},
                {"process": ["host", 1, "../1"]},
                {"more": 1},
            )
        ),
        *(
            (FAILED, entry)
            for entry in ("{", "[9]", '["0", "x", 0, "", false]', '[2, "x", null, "", false]')
        ),
    ],
)
def test_an_entry_that_no_rank_writes_is_named(tmp_path, monkeypatch, key, entry):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = store_at("127.0.0.1", 0, listen=True)
    board = Board(kept, 0, 2, timeout=5.0, grace=0.5)
    assert Heartbeat.read(json.dumps([*BEAT.values()]).encode(), 0.0, 2).waits == [0, "edge"]
    kept.set(key, entry.encode("utf-8", "surrogateescape"))
    match = f"the store has a {'heartbeat of it' if key == 'beat/1' else 'failure'} that no rank"
    with pytest.raises(RankError, match=match) as raised, board.run(starts=True):
        board.exchange_json("meeting", 1)
    assert raised.value.culprit == (key == "beat/1")


def test_a_report_is_written_under_no_name_from_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "reports"))
    (tmp_path / "reports").mkdir()
    (tmp_path / "mine").write_text("mine")
    kept = store_at("127.0.0.1", 0, listen=True)
    board = Board(kept, 0, 2, timeout=5.0, grace=0.5)
    kept.set("part/1", "[")
    kept.set("beat/1", json.dumps([*(BEAT | {"knows": True}).values()]))
    kept.set(FAILED, json.dumps([1, "planned", 0, str(tmp_path / "mine"), False]))
    with pytest.raises(RankError, match="planned") as raised, board.run(starts=True):
        board.exchange_json("meeting", 1)
    assert (tmp_path / "mine").read_text() == "mine"
    assert "First cause: rank 1, planned" in Path(raised.value.report).read_text()


def test_a_damaged_part_of_a_report_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cause = Cause(1, "planned", 0, new_report())
    own = part_of([(("F", 1), 0.0)], None, [], [], "")
    damaged = ["[", "{}", json.dumps(json.loads(own) | {"messages": [[1, {"sent": "x"}]]})]
    beats = [Heartbeat(b"x", 0.0, doing="B 2")] * 4
    failures._write(0, cause, {0: own, **dict(enumerate(damaged, 1))}, beats)
    text = Path(place_of(cause.report)).read_text()
    assert "First cause: rank 1, planned" in text
    assert text.count("ago it said: B 2") == 3


def test_what_cannot_be_listened_on_is_named():
    kept = store_at("127.0.0.1", 0, listen=True)
    with pytest.raises(OSError, match=rf"127\.0\.0\.1, port {kept.port}: Address already in use"):
        store_at("127.0.0.1", kept.port, listen=True)
    with pytest.raises(OSError, match=r"192\.0\.2\.1, port 29500: Cannot assign"):
        store_at("192.0.2.1", 29500, listen=True)
    with pytest.raises(OSError, match=r"no-such-host\.invalid, port 0: "):
        store_at("no-such-host.invalid", 0, listen=True)


@pytest.mark.processes
def test_ranks_meet_whatever_the_store_has_of_earlier_starts():
    """The earlier starts had other numbers of ranks, and some ended right after joining."""
    kept = store_at("127.0.0.1", 0, listen=True)
    for start, ranks in enumerate((3, 2, 4, 1)):
        found = run_ranks(rank_programs.joined, ranks, kept.port, start)
        assert found == [(rank, ranks, float(start * ranks)) for rank in range(ranks)]
        run_ranks(rank_programs.joining, 1, kept.port, 2)  # rank 2, which gets no answer


def test_who_has_not_come_is_named(monkeypatch):
    kept = store_at("127.0.0.1", 0, listen=True)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "WORLD_SIZE": "2"}
    given["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for rank, said in (("0", "rank 1 of 2 has not come"), ("1", "rank 1 has had no answer")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(TimeoutError, match=rf"{said}.* within 0\.3 s"):
            join_ranks(timeout=timedelta(seconds=0.3))


def test_what_no_launcher_has_set_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="expected WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the"):
        join_ranks()


def test_an_address_that_is_not_here_is_named(monkeypatch):
    given = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=r"MASTER_ADDR and .* on 192\.0\.2\.1, port 29500: "):
        join_ranks()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_ADDR": "far", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"MASTER_ADDR": "far", "LOCAL_WORLD_SIZE": "4"}, "lo"),
        ({"MASTER_ADDR": "127.0.0.1"}, "lo"),
        ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
    ids=["far", "one-machine", "local", "chosen"],
)
def test_one_machine_stays_on_loopback(environment, expected):
    given = dict(environment)
    store_module._stay_on_loopback(given, 4)
    assert given.get("GLOO_SOCKET_IFNAME") == expected
