"""Starts processes as ranks of a group, watches them with a deadline, and collects their results.

The fast form forks them from a server that has imported torch and these helpers (preloaded.py).
``run_script`` runs a program as its user would write it in the same processes.
"""

from __future__ import annotations

import faulthandler
import inspect
import itertools
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from operator import attrgetter
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

_DEADLINE = 220.0
_DRAWN = itertools.count()  # ports
_TESTS = Path(__file__).resolve().parents[1]
# The server's module path: up to Python 3.13 it does not get this process's sys.path.
_PATH = os.pathsep.join(
    filter(None, [str(_TESTS), str(_TESTS.parent / "bench"), os.environ.get("PYTHONPATH")])
)


class End(NamedTuple):
    """How a rank ended: exit code (negative: the signal), result, stderr."""

    code: int | None
    value: Any
    error: str
    reports: dict[str, str]  # failure reports of all ranks, by name


class _Program(NamedTuple):
    """A function and its arguments; a module of tests has no name that a rank could import."""

    file: str
    module: str
    name: str
    args: bytes

    def __call__(self, rank: int, ranks: int) -> Any:
        if self.module not in sys.modules:
            spec = spec_from_file_location(self.module, self.file)
            assert spec is not None and spec.loader is not None
            sys.modules[self.module] = made = module_from_spec(spec)
            spec.loader.exec_module(made)
        function = attrgetter(self.name)(sys.modules[self.module])
        return function(rank, ranks, *pickle.loads(self.args))


def _main(
    program: _Program,
    rank: int,
    ranks: int,
    port: int,
    listening: socket.socket | None,
    folder: str,
) -> None:
    out = os.open(f"{folder}/{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    tempfile.tempdir = folder
    # shells ignore it for background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()  # prints the stacks of a rank that crashes
    faulthandler.register(signal.SIGUSR1)  # and that of one that hangs
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # without a keeper it lives and dies with rank 0, as without torchrun
    options: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening.detach()}
    store = dist.TCPStore(
        *("127.0.0.1", port), is_master=bool(options), wait_for_workers=False, **options
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    # A finished rank would otherwise be gone while another one still connects to it.
    store.set(f"connected {rank}", "")
    store.wait([f"connected {each}" for each in range(ranks)])
    try:
        value = program(rank, ranks)
    except BaseException:
        traceback.print_exc()
        raise
    Path(folder, f"{rank}.value").write_bytes(pickle.dumps(value))
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """Started ranks of a function of a module of tests or helpers: ``(rank, ranks, *args)``.

    ``keeper``: whether this process keeps the store, as torchrun does, or rank 0.
    """

    def __init__(
        self, program: Callable[..., Any], ranks: int, *args: Any, keeper: bool = True
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        listening = None
        if keeper:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        else:  # rank 0 gets the socket, so nobody else can take the port
            listening = socket.create_server(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["helpers.preloaded"])
        found = _Program(
            inspect.getfile(program), program.__module__, program.__qualname__, pickle.dumps(args)
        )
        folder = self._folder.name
        self.processes = [
            context.Process(
                target=_main,
                args=(found, rank, ranks, port, None if rank else listening, folder),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        with patch.dict(os.environ, PYTHONPATH=_PATH):
            for process in self.processes:
                process.start()
        if listening is not None:
            listening.close()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def join(self, but: tuple[int, ...] = (), deadline: float = _DEADLINE) -> list[End]:
        """Wait for all ranks except ``but``, which are killed then; code None means a hang."""
        waited = [rank for rank in range(len(self.processes)) if rank not in but]
        for rank in waited:
            self.processes[rank].join(deadline)
        hung = [rank for rank in waited if self.processes[rank].is_alive()]
        for rank in hung:
            with suppress(ProcessLookupError):  # it may end just now
                os.kill(self.pid(rank), signal.SIGUSR1)
            self.processes[rank].join(2.0)
        for process in self.processes:
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


def run_ranks(program: Callable[..., Any], ranks: int, *args: Any, **more: Any) -> list[Any]:
    """Run the program on all ranks, require success, and return every rank's result."""
    ends = Ranks(program, ranks, *args, **more).join()
    assert all(end.code == 0 for end in ends), printed_by(ends)
    return [end.value for end in ends]


def printed_by(ends: Sequence[End]) -> str:
    """Return what an assertion about ends should show."""
    return "\n".join(f"rank {rank}: {end.code}\n{end.error}" for rank, end in enumerate(ends))


def run_script(path: Path, ranks: int = 1, *arguments: str, folder: Path) -> str:
    """Run a program in a folder like Python or torchrun; return rank 0's output.

    Saves the seconds in which torchrun starts and each process imports torch.
    """
    found: str = run_ranks(_script, ranks, free_port(), str(path), arguments, str(folder))[0]
    return found


def _script(
    rank: int, ranks: int, port: int, path: str, arguments: tuple[str, ...], folder: str
) -> str:
    dist.destroy_process_group()  # the test's group: the program makes its own
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
    """Run another pytest in a folder; return its exit code and output."""
    code, printed = run_ranks(_pytest, 1, str(folder), list(map(str, arguments)))[0]
    return code, printed


def _pytest(rank: int, ranks: int, folder: str, arguments: list[str]) -> tuple[int, str]:
    for name in list(os.environ):  # pytest-benchmark is disabled under pytest-xdist's variables
        if name.startswith("PYTEST_"):
            del os.environ[name]
    os.chdir(folder)
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        code = pytest.main(["-p", "no:cacheprovider", *arguments])
    return int(code), printed.getvalue()


def run_said(main: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """Replace ``bench_distributed.spawned``; return one rank's result."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = run_ranks(_said, ranks, main, store.port, arguments)
    return next(each[0] for each in heard if each)


def _said(
    rank: int, ranks: int, main: Callable[..., None], port: int, arguments: tuple[Any, ...]
) -> list[Any]:
    dist.destroy_process_group()  # the test's group: the command makes its own
    said = Queue[Any]()
    *before, options = arguments
    main(rank, ranks, port, *before, said, options)
    return list(said.queue)


def free_port() -> int:
    """Return a port below those of outgoing connections, so that it stays free.

    Test processes draw different ones: their numbers differ, and no process draws one twice.
    """
    while True:
        port = 20000 + (97 * os.getpid() + next(_DRAWN)) % 12000
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port


def hangs(rank: int, ranks: int, scale: object, culprit: int) -> str:
    """Hang in one rank; the launcher of the GPU suite imports this in each."""
    if rank == culprit:
        time.sleep(1000)
    return f"rank {rank} of {ranks}"
