"""Processes that are the ranks of a group: started, watched with a deadline, their ends collected.

They come from a server that has imported torch and these helpers already (preloaded.py).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import runpy
import secrets
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from slow_link import Host

_DEADLINE = 120.0
_TESTS = Path(__file__).resolve().parents[1]
# What the server looks for modules in: up to Python 3.13 it does not get this process's sys.path.
_PATH = os.pathsep.join(
    filter(None, [str(_TESTS), str(_TESTS.parent / "bench"), os.environ.get("PYTHONPATH")])
)


class End(NamedTuple):
    """How a rank ended: exit code (negative: the signal), what it returned, its stderr."""

    code: int | None
    value: Any
    error: str
    reports: dict[str, str]  # of failures, by name: those of all ranks


def _main(
    program: Callable[..., Any],
    rank: int,
    ranks: int,
    port: int,
    folder: str,
    port_of_store: Any,
    hosts: tuple[Host, ...] | None,
    args: tuple[Any, ...],
) -> None:
    out = os.open(f"{folder}/{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    tempfile.tempdir = folder
    # which shells ignore for what they run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)  # says where it is, to whom it keeps waiting
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = "127.0.0.1"
    if hosts is not None:
        hosts[rank].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = hosts[rank].interface
        address = hosts[0].address
    torch.set_num_threads(1)
    if port:
        store = dist.TCPStore(address, port, is_master=False)
    elif rank == 0:  # the store lives and dies with rank 0, as without torchrun
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        for _ in range(ranks - 1):
            port_of_store.put(store.port)
    else:
        store = dist.TCPStore(address, port_of_store.get(), is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    # A rank that has done its work already would be gone while another one still connects to it.
    store.set(f"connected {rank}", "")
    store.wait([f"connected {each}" for each in range(ranks)])
    try:
        value = program(rank, ranks, *args)
    except BaseException:
        traceback.print_exc()
        raise
    partial = Path(folder, f"{rank}.partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(Path(folder, f"{rank}.value"))
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """Started ranks.

    Args:
        program: a function of a module that can be imported: ``(rank, ranks, *args)``.
        ranks: their number.
        args: more arguments.
        keeper: whether this process keeps the store, as torchrun does, or rank 0.
        hosts: where each rank is, None: all here; without a keeper only.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        ranks: int,
        *args: Any,
        keeper: bool = True,
        hosts: tuple[Host, ...] | None = None,
    ) -> None:
        assert hosts is None or not keeper
        self._folder = tempfile.TemporaryDirectory()
        self._store = None
        if keeper:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = 0 if self._store is None else self._store.port
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["helpers.preloaded"])
        # a pipe would mix up what several read at once; kept, as its lock has to outlive the starts
        self._port_of_store = context.SimpleQueue()
        self.processes = [
            context.Process(
                target=_main,
                args=(
                    program,
                    rank,
                    ranks,
                    port,
                    self._folder.name,
                    self._port_of_store,
                    hosts,
                    args,
                ),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        with patch.dict(os.environ, PYTHONPATH=_PATH):
            for process in self.processes:
                process.start()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def join(self, but: tuple[int, ...] = (), deadline: float = _DEADLINE) -> list[End]:
        """Wait for all ranks ``but`` those, which are killed then; code None: it hung."""
        hung = []
        for rank, process in enumerate(self.processes):
            if rank not in but:
                process.join(deadline)
                if process.is_alive():
                    hung.append(rank)
        for rank, process in enumerate(self.processes):
            if rank in hung:
                with suppress(ProcessLookupError):  # it may end just now
                    os.kill(self.pid(rank), signal.SIGUSR1)
                process.join(2.0)
            if process.is_alive():
                process.kill()
            process.join()
        ends = []
        written = Path(self._folder.name).glob("spectrain-failure-*")
        reports = {str(path): path.read_text() for path in written}
        for rank, process in enumerate(self.processes):
            value = Path(self._folder.name, f"{rank}.value")
            error = Path(self._folder.name, f"{rank}.err")
            ends.append(
                End(
                    None if rank in hung else process.exitcode,
                    pickle.loads(value.read_bytes()) if value.exists() else None,
                    error.read_text() if error.exists() else "",
                    reports,
                )
            )
        self._folder.cleanup()
        return ends


def run_ranks(
    program: Callable[..., Any],
    ranks: int,
    *args: Any,
    keeper: bool = True,
    hosts: tuple[Host, ...] | None = None,
) -> list[Any]:
    """Run the program on all ranks, expect success, return what each returned."""
    ends = Ranks(program, ranks, *args, keeper=keeper, hosts=hosts).join()
    for rank, end in enumerate(ends):
        assert end.code == 0, f"rank {rank} ended with {end.code}:\n{end.error}"
    return [end.value for end in ends]


def run_script(path: Path, ranks: int = 1, *arguments: str, folder: Path) -> str:
    """Run a program in a folder, as Python does or, on several ranks, torchrun; what rank 0 prints.

    Without the seconds that torchrun takes to start, and each of its processes to import torch.
    """
    return run_ranks(_script, ranks, free_port(), str(path), arguments, str(folder))[0]


def _script(
    rank: int, ranks: int, port: int, path: str, arguments: tuple[str, ...], folder: str
) -> str:
    dist.destroy_process_group()  # of the test: the program makes its own
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), TORCHELASTIC_RESTART_COUNT="0")
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.chdir(folder)
    sys.argv = [path, *arguments]
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run_pytest(folder: Path, *arguments: object) -> tuple[int, str]:
    """Run another pytest in a folder; its exit code, and what it prints."""
    code, printed = run_ranks(_pytest, 1, str(folder), list(map(str, arguments)))[0]
    return code, printed


def _pytest(rank: int, ranks: int, folder: str, arguments: list[str]) -> tuple[int, str]:
    for name in list(os.environ):  # a benchmark is no benchmark beside what pytest-xdist starts
        if name.startswith("PYTEST_"):
            del os.environ[name]
    os.chdir(folder)
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        code = pytest.main(["-p", "no:cacheprovider", *arguments])
    return int(code), printed.getvalue()


def run_main(main: Callable[..., None], arguments: tuple[Any, ...], nprocs: int, **_: Any) -> None:
    """What starts the ranks of a command of the package's, in the place of ``torch``'s spawn."""
    run_ranks(_main_of, nprocs, main, arguments)


def _main_of(rank: int, ranks: int, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    dist.destroy_process_group()  # of the test: the command makes its own
    main(rank, *arguments)


def run_said(main: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """The same in the place of ``bench_distributed.spawned``: what one of the ranks says."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = run_ranks(_said, ranks, main, store.port, arguments)
    return next(each[0] for each in heard if each)


def _said(
    rank: int, ranks: int, main: Callable[..., None], port: int, arguments: tuple[Any, ...]
) -> list[Any]:
    said = _Said()
    *before, options = arguments
    _main_of(rank, ranks, main, (ranks, port, *before, said, options))
    return list(said)


class _Said(list[Any]):
    put = list.append


def free_port() -> int:
    """A port that stays free: below those that outgoing connections are given meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port
