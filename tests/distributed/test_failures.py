"""Tests failures of a rank: all ranks end, blame the right one, and write one report."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import count, cycle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.failing_runs import TIMEOUT, commit, expect_one_end, fail, timeout_of, trial
from helpers.rank_cases import Case
from helpers.ranks import Ranks, free_port, printed_by, run_ranks
from helpers.replica_programs import sgd
from helpers.ways import hidden, hurried, travelling
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import spectrain_ext as st

pytestmark = pytest.mark.processes
nightly = pytest.mark.nightly

# In a run

SEEDS = {
    **{"stages": (6, 200), "chunks": (3, 60), "replicas": (5, 60), "averaged": (4, 20)},
    "ties": (1, 20),
}


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=[] if seed < few else nightly)
        for kind, (few, most) in SEEDS.items()
        for seed in range(most)
    ],
)
def test_one_end_for_all(kind, seed):
    ranks, what = trial(seed, kind)
    expect_one_end(Ranks(fail, ranks, what, keeper=what["keeper"]), what)


def fail_inside(rank, ranks, where):
    """Fail on rank 1 inside a call of gloo: in a signal handler, or in the receiving thread."""
    case, calls, group = Case("vanilla", (ranks, 1)), count(), dist.ProcessGroup
    pipe = case.pipeline(rank, timeout=20.0)

    def killed(*_):  # as a DataLoader's handler, when one of its workers is killed
        raise RuntimeError("planned")

    signal.signal(signal.SIGUSR2, killed)
    real = {"handler": group.send, "thread": group.recv}[where]

    def failing(*given):
        mine = threading.current_thread() is threading.main_thread()
        if mine == (where == "handler") and next(calls) == 5:
            if where == "thread":
                raise MemoryError("planned")
            signal.raise_signal(signal.SIGUSR2)
        return real(*given)

    if rank == 1:
        setattr(group, real.__name__, failing)
    list(pipe.run(case.batches([8] * 30)))


@pytest.mark.parametrize(
    ("where", "error"), [("handler", "RuntimeError: planned"), ("thread", "MemoryError: planned")]
)
def test_only_an_error_of_a_connection_blames_the_rank_at_its_other_end(where, error):
    ends = Ranks(fail_inside, 3, where).join()
    assert error in ends[1].error
    for rank in (0, 2):
        assert re.search(f"first cause: rank 1, .*: {error}; report", ends[rank].error)


def wait_for_abort(rank, ranks, fails):
    """Fail on rank 0 while rank 1 waits in a call, as for a device, until an abort.

    The call then fails, or returns data that has not arrived. Return whether there was an abort,
    the error and its cause.
    """
    store, aborted, turns = _get_default_store(), threading.Event(), count()

    class Work:
        def wait(self):
            store.set("waits", "")
            aborted.wait()
            if fails:
                raise RuntimeError("the communicator was aborted")

    def check(*_):
        if rank:
            raise ValueError("not a number")
        if next(turns):
            store.wait(["waits"], timedelta(seconds=30))
            raise ArithmeticError("planned")

    with travelling("apart"), patch.object(dist.ProcessGroup, "abort", lambda _: aborted.set()):
        case = Case("vanilla", (2, 1))
        pipe = case.pipeline(rank, timeout=20.0)
        next(pipe.children()).register_forward_pre_hook(check)
        receive = (lambda *_, **__: Work()) if rank else dist.irecv
        with patch.object(dist, "irecv", receive), pytest.raises(RuntimeError) as caught:
            list(pipe.run(case.batches([8] * 4)))
    return aborted.is_set(), str(caught.value), str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("fails", "cause"), [(True, "the communicator was aborted"), (False, "None")]
)
def test_an_abort_ends_a_wait_for_the_device(fails, cause):
    (aborted, *_), (_, report, why) = run_ranks(wait_for_abort, 2, fails)
    assert aborted
    assert report.startswith("rank 1, "), report
    assert re.search("first cause: rank 0, .*ArithmeticError: planned", report), report
    assert cause in why


# Between two network namespaces

HOSTS = [f"st{os.getpid()}n{side}" for side in (1, 2)]  # namespaces, and their ends of the link
_CLONE_NEWNET = 0x40000000


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    try:
        for host in HOSTS:
            ip(f"netns add {host}")
        ip("link add {0} netns {0} type veth peer name {1} netns {1}".format(*HOSTS))
        for side, host in enumerate(HOSTS, 1):
            ip(f"-n {host} addr add 10.213.0.{side}/24 dev {host}")
            ip(f"-n {host} link set lo up")
            ip(f"-n {host} link set {host} up")
        yield HOSTS
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs two network namespaces: {getattr(error, 'stderr', error)}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def train_on(rank: int, ranks: int, hosts: list[str], mark: str) -> None:
    """Train until stopped; open a FIFO when the test may stop it."""
    dist.destroy_process_group()  # the test's group, on this host
    host = hosts[rank == ranks - 1]
    with open(f"/run/netns/{host}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    os.environ.update(GLOO_SOCKET_IFNAME=host, RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="10.213.0.1", MASTER_PORT="29500")
    st.join_ranks()
    case = Case("vanilla", (ranks, 1))
    pipe = case.pipeline(rank, microbatches=1, timeout=TIMEOUT)
    for result in pipe.run(cycle(case.batches([16]))):
        if rank == ranks - 1 and result.index == 20:
            with open(mark, "w"):
                pass


@pytest.mark.network
def test_a_cut_link_ends_all_ranks(tmp_path: Path, hosts: list[str]) -> None:
    mark = tmp_path / "mark"
    os.mkfifo(mark)
    ranks = Ranks(train_on, 3, hosts, str(mark))
    with mark.open():  # until the last rank has received the minibatches
        pass
    ip(f"-n {hosts[1]} link set {hosts[1]} down")
    ends = ranks.join(deadline=60.0)
    told = printed_by(ends)
    assert [end.code for end in ends] == [1, 1, 1], told
    assert "waiting on edge 2 -> 1 " in ends[1].error, told
    assert "waiting on edge 1 -> 2 " in ends[2].error, told
    for end in ends[:2]:
        assert "first cause: rank 2, " in end.error, told
    for end in ends:
        for waited in re.findall(r"waiting on .*? for ([0-9.]+) s", end.error):
            assert float(waited) < TIMEOUT + 10, told


# Before a run


def open_badly(rank, ranks, culprit, group, fault):
    """Fail on one rank when it makes this group, before the others have connected."""
    made, real = count(), dist.new_group

    def new_group(*given, **more):
        if rank == culprit and next(made) == group:
            commit(fault)
        return real(*given, **more)

    dist.new_group = new_group
    Case("vanilla", (ranks, 1)).pipeline(rank, timeout=4.0 if fault == "hang" else 20.0)


@pytest.mark.parametrize(
    ("culprit", "group", "fault"),
    [(0, 0, "exception"), (1, 2, "exception"), (2, 3, "exception"), (2, 0, "hang")],
)
def test_a_rank_that_fails_while_links_are_opened(culprit, group, fault):
    ends = Ranks(open_badly, 3, culprit, group, fault).join()
    assert [end.code for end in ends] == [1, 1, 1]
    planned = f"rank {culprit}, .*ArithmeticError: planned"
    if fault == "hang":  # to the board, both ends wait for each other
        planned = "rank [12], opening edge 1 -> 2: waits on edge 1 -> 2"
    for rank, end in enumerate(ends):
        if rank != culprit or fault == "hang":
            assert f"rank {rank}, " in end.error
            assert re.search(f"first cause: {planned}", end.error), end.error
        else:
            assert "ArithmeticError: planned" in end.error


def miss(rank, ranks, culprit, fault):
    """Leave one rank without its pipeline, or until the others have given up if it is late."""
    store = _get_default_store()
    if rank == culprit and fault == "late":
        store.wait(["gave up"])
    elif rank == culprit:
        commit(fault)
    with hurried():
        try:
            Case("vanilla", (ranks, 1)).pipeline(rank, timeout=4.0)
        finally:
            if fault != "stop":  # which the store would wait for
                store.set("gave up", "")


@pytest.mark.parametrize(
    ("culprit", "fault", "keeper"), [(0, "hang", False), (0, "stop", False), (1, "late", True)]
)
def test_a_rank_that_does_not_make_its_pipeline(culprit, fault, keeper):
    late = fault == "late"
    ends = Ranks(miss, 3, culprit, fault, keeper=keeper).join(but=() if late else (culprit,))
    cause = f"rank {culprit}, meeting: it has not come within 5.0 s"
    waiting = ""
    if fault == "stop":  # it keeps the store, which then answers nobody, now or a little later
        waiting = "(, waiting on the store for 5.0 s)?"
        cause = "rank 0, last known in starting: the store that it keeps does not answer"
    for rank, end in enumerate(ends):
        if rank != culprit or late:
            assert end.code == 1
            told = f"RankError: rank {rank}, meeting{waiting}; first cause: {cause}"
            assert re.search(told, end.error), end.error


def leave_early(rank, ranks):
    """End rank 0, which keeps the store, before the others connect."""
    case = Case("vanilla", (ranks, 1))
    if rank == 0:
        case.pipeline(rank, timeout=-1.0)
    with suppress(RuntimeError):
        while True:
            _get_default_store().check(["anything"])
    case.pipeline(rank, timeout=20.0)


def test_rank_0_keeps_the_store_and_ends_early():
    first, *others = Ranks(leave_early, 3, keeper=False).join()
    assert "timeout: expected a positive number of seconds" in first.error
    for end in others:
        assert end.code == 1
        assert "first cause: rank 0, last known in starting: its process has ended" in end.error


def beside(rank, ranks, end, then, folder):
    """Train beside a pipeline of rank 0, which keeps the group's store and ends.

    If ``then`` is "hidden", nobody can tell under which address another store would be found. If it
    is "opening", rank 0 ends while the other pipeline is made.
    """
    shared = _get_default_store()
    if rank == 0:
        shared.set("process", str(os.getpid()))
    first = Path(f"/proc/{int(shared.get('process'))}/stat")
    group = [dist.new_group([0]), dist.new_group([1, 2])][min(rank, 1)]
    if then == "absent" and rank == 1:
        return commit("hang")

    real, way = dist.new_group, hidden() if then == "hidden" else nullcontext()

    def new_group(*given, **more):
        shared.set(f"made {rank}", "")
        while not has_ended(first):
            pass
        return real(*given, **more)

    dist.new_group = new_group if then == "opening" and rank else real
    with hurried(), way:
        loss_fn = nn.functional.mse_loss
        pipe = st.DistributedPipeline(nn.Linear(4, 4), sgd, loss_fn, group=group, timeout=TIMEOUT)
    batches = [(torch.ones(8, 4), torch.ones(8, 4))] * 8
    shared.set(f"made {rank}", "")
    if rank == 0:
        next(iter(pipe.run(batches)))
        shared.wait([f"made {each}" for each in range(ranks)])
        return commit(end)
    for _ in pipe.run(cycle(batches)):
        if pipe.rank == 0 and has_ended(first):
            break
    if then == "kill" and rank == 1:
        commit("kill")
    trained = len(list(pipe.run(batches)))
    pipe(batches[0][0])
    st.checkpoint.save(Path(folder, "saved"), pipe)
    return trained


def has_ended(process: Path) -> bool:
    """Whether a process has ended or is stopped."""
    try:
        return process.read_text().rpartition(")")[2].split()[0] in "TZ"
    except OSError:
        return True


@pytest.mark.parametrize("end", ["exception", "stop"])
def test_a_pipeline_outlives_the_store_of_the_group(end, tmp_path):
    _, *others = Ranks(beside, 3, end, "", str(tmp_path), keeper=False).join(but=(0,))
    assert [(each.code, each.value) for each in others] == [(0, 8), (0, 8)], printed_by(others)
    assert (tmp_path / "saved").exists()


GROUPS_STORE = "rank 0, of the process group, not of this pipeline: its process has ended"


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("hidden", GROUPS_STORE),
        ("opening", GROUPS_STORE),
        ("kill", "rank 0, .*: (its process has ended|its connection was closed|no sign of life)"),
        ("absent", r"rank 0, meeting: it has not come within 5\.0 s"),
    ],
    ids=["hidden", "opening", "kill", "absent"],
)
def test_who_keeps_a_store_is_named(then, told, tmp_path):
    *_, last = Ranks(beside, 3, "exception", then, str(tmp_path), keeper=False).join(but=(0, 1))
    assert last.code == 1, last.error
    assert re.search(f"RankError: rank 1, .*first cause: {told}", last.error), last.error


# Between runs


def fail_between(rank, ranks, fault, folder):
    """Rank 1 leaves out a call, hangs in another one's part, or is gone before the first run."""
    case, store = Case("vanilla", (ranks, 1)), _get_default_store()
    pipe, data = case.pipeline(rank, timeout=TIMEOUT), case.batches([8] * 4)
    if rank == 1:
        store.set("pid", str(os.getpid()))
    if rank == 1 and fault == "gone":
        os._exit(7)
    process = Path(f"/proc/{int(store.get('pid'))}/stat")
    while fault == "gone" and " Z " not in process.read_text():
        pass
    if fault == "extra":
        manager = st.checkpoint.CheckpointManager(folder, pipe, every_minibatches=2)
        list(manager.run(data, extra=lambda: commit("hang") if rank == 1 else None))
    if fault == "evaluate" and rank != 1:
        pipe.evaluate(data)
    list(pipe.run(data))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("gone", "its connection was closed without a word"),
        ("extra", "calling extra for a checkpoint: busy with it for "),
        ("evaluate", "in 'run', while other ranks are in 'an evaluation': every rank makes"),
    ],
)
def test_between_runs_the_right_rank_is_blamed(tmp_path, fault, told):
    ends = Ranks(fail_between, 3, fault, str(tmp_path)).join()
    for end in (ends[0], ends[2]):
        assert end.code == 1
        assert re.search(f"RankError: .*first cause: rank 1, .*{told}", end.error), end.error


# The failure report


def section(report, rank):
    """Return one rank's section of a report, if that rank has reported."""
    begins = rf"^=+ rank {rank} of \d+: "
    (found,) = re.findall(rf"{begins}(.*?)(?=^=|\Z)", report, re.MULTILINE | re.DOTALL)
    return found


def planned(fault, culprit, **more):
    """Return a trial that fails in the eighth forward."""
    what = {"fault": fault, "culprit": culprit, "stage": culprit, "where": "forward", "when": 7}
    what |= {"kind": "stages", "chunks": 1, "method": "pipedream"}
    return {**what, "timeout": timeout_of(fault), "settings": {"microbatches": 1}, **more}


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        *(("exception", 0), ("kill", 1), ("stop", 0), ("exit", 1), ("hang", 0), ("hang", 1)),
        *(("interrupt", 1), ("interrupt one", 0)),
    ],
)
def test_one_report_of_all_ranks(tmp_path, fault, culprit):
    pipe = tmp_path / "hangs"
    what = planned(fault, culprit)
    if "interrupt" in fault:
        os.mkfifo(pipe)
        what.update(fault=str(pipe), timeout=300.0)
    ranks = Ranks(fail, 3, what)
    if "interrupt" in fault:
        with open(pipe):
            for rank in [culprit] if "one" in fault else range(3):
                os.kill(ranks.pid(rank), signal.SIGINT)
    ends = ranks.join()
    ((path, report),) = ends[0].reports.items()
    silent = fault in ("kill", "stop", "exit")
    told = [r for r in range(3) if r != culprit or not silent]
    for rank in told:
        assert f"report of this machine's ranks: {path}" in ends[rank].error
        mine = section(report, rank)
        first = "[012]" if fault == "interrupt" else culprit
        assert re.search(rf"^First cause: rank {first}, .*", mine, re.MULTILINE)
        assert "of minibatch" in mine.partition("Python stacks")[0]
        assert "Python stacks\nthread MainThread\n" in mine
        for other in range(3):
            heard = r"; heard \d+\.\d+ s ago" if other != rank else ""
            assert re.search(rf"^  {other}  .+, for .* s.*{heard}$", mine, re.MULTILINE)
    if silent:
        # A stopped rank continues after the others noticed its silence, and may still report.
        assert f"= rank {culprit} " not in report or fault == "stop"
    else:
        assert "in commit\n" in section(report, culprit)
        assert not any("in commit\n" in section(report, r) for r in told if r != culprit)
    if fault == "hang":  # until nothing changes any more
        assert re.search(r"^  2  .*; waits for edge 1 -> 2$", section(report, 2), re.MULTILINE)


def test_without_the_store_every_rank_writes_its_own():
    ends = Ranks(fail, 3, planned("kill", 0), keeper=False).join()
    for rank in (1, 2):
        found = re.findall(
            r"report of this machine's ranks: (\S+)$", ends[rank].error, re.MULTILINE
        )
        (path,) = {*found}
        report = ends[rank].reports[path]
        assert "thread MainThread\n" in section(report, rank)


def test_a_report_that_cannot_be_written_is_not_missed(tmp_path):
    (tmp_path / "file").touch()
    what = planned("exception", 1, temporary=str(tmp_path / "file" / "below"))
    expect_one_end(Ranks(fail, 3, what), what)


# How a plain program ends: other tests' ranks end by os._exit, without Python's shutdown

PROGRAM = """
import itertools, os, signal, sys
import torch
from torch import nn
import spectrain_ext as st
import spectrain_ext.checkpoint, spectrain_ext.distributed.distributed_pipeline

for trial in sys.argv[1:]:
    fault, culprit, port = trial.split(":")
    pids = []
    for rank in range(3):
        pids.append(os.fork())
        if not pids[-1]:
            break
    else:  # the parent
        codes = dict(os.wait() for _ in pids)
        os.write(2, f"\\nEND {trial}\\n".encode())
        print(*(os.waitstatus_to_exitcode(codes[pid]) for pid in pids), flush=True)
        continue
    break
else:
    sys.exit()

culprit = int(culprit)
os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_PORT=port)
st.join_ranks()
signal.signal(signal.SIGINT, signal.default_int_handler)


class Stage(nn.Linear):
    def forward(self, x):
        if rank == culprit and next(calls) == 7:
            if fault == "error":
                raise ArithmeticError("planned")
            if fault in ("kill", "interrupt"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGINT)
        return super().forward(x)


calls = itertools.count()
data = itertools.cycle([(torch.ones(8, 4), torch.ones(8, 4))])
pipe = st.DistributedPipeline(
    Stage(4, 4), lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss, "vanilla", timeout=60
)
try:
    runs = [pipe.run(data)]
    run = None if "bare" in fault else runs[0]
    for result in runs.pop():
        if rank == culprit and result.index == 5:
            if "leave" in fault:
                sys.exit(7)
            if "loop" in fault:
                raise KeyError("planned")
    for _ in pipe.run(data):
        pass
except st.RankError as error:
    os.write(2, f"\\n{error}\\n".encode())  # at once, as all ranks write there
    if rank == 2:
        sys.exit(42)
    raise
"""

LOOP = "the caller's loop, which has the result of minibatch 5: "
#: By fault: the culprit, its exit code, and what the others say of it.
ENDINGS = {
    "error": (1, 1, "stage 1, minibatch 7, forward: ArithmeticError: planned"),
    "interrupt": (0, -signal.SIGINT, "KeyboardInterrupt"),
    "kill": (0, -signal.SIGKILL, "its process has ended, with the store that it kept"),
    "leave": (1, 7, f"{LOOP}.* the program has ended"),
    "loop": (0, 1, f"{LOOP}KeyError: 'planned'"),
    # The iterator has no name, so the exception ends it before it ends the program.
    "bare leave": (1, 7, f"{LOOP}an exception has ended the loop"),
    "bare loop": (0, 1, f"{LOOP}an exception has ended the loop"),
}


def test_a_plain_program_ends_with_its_own_exit_code(tmp_path):
    more = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    more |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    trials = [f"{fault}:{culprit}:{free_port()}" for fault, (culprit, *_) in ENDINGS.items()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *trials],
        **{"capture_output": True, "text": True, "timeout": 280},
        env={**os.environ, **more},
    )
    *errors, _ = re.split("^END .*$", done.stderr, flags=re.MULTILINE)
    found = zip(ENDINGS.values(), done.stdout.splitlines(), errors, strict=True)
    for (culprit, code, reason), codes, printed in found:
        expected = [1, 1, 42]
        expected[culprit] = code
        assert [int(each) for each in codes.split()] == expected, printed
        causes = re.findall(r"^rank \d, .*; first cause: rank (\d), (.*)", printed, re.MULTILINE)
        assert len(causes) == 2, printed
        for rank, told in causes:
            assert int(rank) == culprit
            assert re.search(reason, told), told
