"""Starts the ranks of a run as processes, watches them with a deadline, and ends them all."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from .scale import ROOT, Scale

_PRELOADED = ("torch.distributed", "spectrain_ext", "gpu.ranks")


@dataclass
class Ended:
    """How a rank ended."""

    code: int | None = None  # negative: the signal; None: it hung and was killed
    value: Any = None  # return value
    error: str = ""  # exception
    said: str = ""  # stdout and stderr


def launch(
    program: Callable[..., Any],
    ranks: int,
    scale: Scale,
    *arguments: Any,
    limit_s: float,
) -> list[Ended]:
    """Run `program(rank, ranks, scale, *arguments)` on all ranks; kill ranks that hang.

    Ranks are forks of a server that has imported torch but never used a GPU.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.launch", *_PRELOADED])
    with tempfile.TemporaryDirectory() as folder:
        given = (program, ranks, store.port, folder, scale, arguments)
        processes = [
            context.Process(target=_main, args=(rank, *given), daemon=True) for rank in range(ranks)
        ]
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(ROOT / "bench")]))
        try:
            for process in processes:
                process.start()
        finally:
            os.environ["PYTHONPATH"] = before
        ended = [Ended() for _ in processes]
        _watch(processes, ended, time.time() + limit_s)
        for rank, end in enumerate(ended):
            _collect(Path(folder), rank, end)
    return ended


def run_all(
    program: Callable[..., Any],
    ranks: int,
    scale: Scale,
    *arguments: Any,
    limit_s: float,
) -> list[Any]:
    """Return every rank's result; raise AssertionError if a rank has none."""
    ended = launch(program, ranks, scale, *arguments, limit_s=limit_s)
    for rank, end in enumerate(ended):
        if end.code != 0:
            raise AssertionError(f"rank {rank} {how(end)}")
    return [end.value for end in ended]


def how(end: Ended) -> str:
    """Describe how a rank ended, with the end of its output."""
    code = "hung" if end.code is None else f"ended with {end.code}"
    return f"{code}: {end.error or end.said[-1500:]}"


def _watch(processes: Sequence[Any], ended: Sequence[Ended], until: float) -> None:
    running = dict(enumerate(processes))
    asked = False
    while running:
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                ended[rank].code = process.exitcode
                del running[rank]
        if running and time.time() > until:
            for process in running.values():
                with suppress(ProcessLookupError):
                    # The first signal prints its stack, the second ends it.
                    os.kill(process.pid, signal.SIGKILL if asked else signal.SIGUSR1)
            if asked:
                for process in running.values():
                    process.join()
                return
            asked, until = True, time.time() + 1.0
        time.sleep(0.01)


def _collect(folder: Path, rank: int, end: Ended) -> None:
    for name, attribute in (("out", "said"), ("error", "error")):
        path = folder / f"{rank}.{name}"
        if path.exists():
            setattr(end, attribute, path.read_text(errors="replace"))
    print(f"rank {rank} ended with {end.code}\n{end.said[-20000:]}", flush=True)
    value = folder / f"{rank}.value"
    if value.exists():
        end.value = pickle.loads(value.read_bytes())  # written by this program
    elif end.code == 0:
        end.code, end.error = None, "it ended without a result"


def _main(
    rank: int,
    program: Callable[..., Any],
    ranks: int,
    port: int,
    folder: str,
    scale: Scale,
    arguments: tuple[Any, ...],
) -> None:
    out = os.open(f"{folder}/{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if scale.on_gpu:
            torch.cuda.set_device(rank % scale.gpus)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
        )
        value = program(rank, ranks, scale, *arguments)
    except BaseException as error:
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        raise
    partial = Path(folder, f"{rank}.partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(Path(folder, f"{rank}.value"))
    dist.barrier()
    dist.destroy_process_group()
