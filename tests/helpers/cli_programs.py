"""What tests of commands share: how one is called in this process, and what it listens on."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
from click.testing import CliRunner, Result

from spectrain_ext.tools.commands.__main__ import main as spectrain


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


__all__ = ["called", "listening", "spectrain", "text_of", "undrawn"]
