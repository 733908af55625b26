"""What tests of commands share: how one is called in this process, and what it listens on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch.distributed as dist
from click.testing import CliRunner, Result
from helpers.ranks import run_ranks

from spectrain_ext.cli.__main__ import main as spectrain


def called(
    command: click.Command,
    *arguments: object,
    draws: bool = False,
    env: dict[str, str] | None = None,
) -> Result:
    """Call a command in this process; without ``draws`` its pictures are empty files."""
    with nullcontext() if draws else undrawn():
        return CliRunner().invoke(command, [*map(str, arguments)], env=env)


def text_of(result: Result) -> str:
    """Return what a command printed as one line, without the frame of an error."""
    return " ".join(result.output.replace("│", " ").split())


def measured_briefly(
    main: Callable[..., None], arguments: tuple[Any, ...], nprocs: int, **_: Any
) -> None:
    """Replace torch's spawn of the ranks that measure a link, for a few messages instead of 200."""
    run_ranks(_briefly, nprocs, main, arguments)


def _briefly(rank: int, ranks: int, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    dist.destroy_process_group()  # the test's group: the command makes its own
    vars(sys.modules[main.__module__]).update(_TIMES=8, _WARM=2, _ROUNDS=1)
    main(rank, *arguments)


def undrawn():
    """Replace pictures by empty files in the block: drawing takes longer than the training."""
    from matplotlib.figure import Figure

    return patch.object(Figure, "savefig", lambda self, path, **more: Path(path).touch())


def listening():
    opened = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            opened.add(os.fstat(int(fd)).st_ino)
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and int(rest[5]) in opened:
                # four-byte words, each in the machine's byte order
                words = np.frombuffer(bytes.fromhex(local.split(":")[0]), ">u4")
                found.append(socket.inet_ntop(family, words.astype("=u4").tobytes()))
    return found


__all__ = ["called", "listening", "measured_briefly", "spectrain", "text_of", "undrawn"]
