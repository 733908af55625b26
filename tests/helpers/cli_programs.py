"""Programs that ranks run in the tests of the command line."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import torch
import torch.distributed as dist
from click.testing import CliRunner
from helpers.rank_pipelines import Faulty, small
from torch import nn

from studies import compare
from studies.__main__ import main
from studies.world import World, agreed
from studies.world import joined as joined_quietly


def undrawn():
    """Replace pictures by empty files in the block: drawing takes longer than the training."""
    from matplotlib.figure import Figure

    return patch.object(Figure, "savefig", lambda self, path, **more: Path(path).touch())


def train(rank, ranks, port, *arguments):
    """Run ``studies train`` in torchrun's environment; return exit code and output."""
    dist.destroy_process_group()  # the test's group: the command makes its own
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **where)
    with undrawn():
        done = CliRunner().invoke(main, ["train", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def train_failing(rank, ranks, port, culprit, *arguments):
    """Run ``train`` with a stage that raises in its fourth forward; return the error's output."""
    build = compare.stages_in

    def faulty(*given):
        stages = build(*given)
        stages[culprit] = Faulty(stages[culprit], "exception", "forward", 3)
        return stages

    compare.stages_in = faulty
    # not returned: the groups would end cleanly and wait for messages in flight
    raise Told(*train(rank, ranks, port, *arguments))


class Told(Exception):
    """The output of a command and its end."""


@contextmanager
def joined(rank, ranks, port):
    if dist.is_initialized():
        dist.destroy_process_group()  # the test's group: the world makes its own
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    world = World(rank, ranks, rank)
    with world.joined(cuda=False):
        yield world


def talk(rank, ranks, port):
    """Return what the ranks receive from each other."""
    stages = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(ranks)]
    with torch.no_grad():
        for tensor in stages[rank].state_dict().values():
            tensor.fill_(rank + 1)
    with joined(rank, ranks, port) as world:
        world.collect(stages)
        return {
            "told": world.tell("ä" * rank if rank < 2 else [0.1, float("nan")]),
            "state": [[float(t.sum()) for t in stage.state_dict().values()] for stage in stages],
        }


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


def where_it_listens(rank, ranks, port):
    """Return the addresses on which a rank of ``python -m studies train`` listens."""
    dist.destroy_process_group()
    del os.environ["GLOO_SOCKET_IFNAME"]  # let the command choose
    was = listening()
    with joined(rank, ranks, port) as world:
        world.tell(1)
        small(rank, ranks)
        found = listening()
    for address in was:
        found.remove(address)
    return found


def collect_from_nobody(rank, ranks, port):
    """End the last rank silently while the first one collects the stages."""
    stages = [nn.Linear(1000, 1000) for _ in range(ranks)]
    with joined(rank, ranks, port) as world:
        if rank == ranks - 1:
            os._exit(7)
        world.collect(stages)


def wait_for_the_first(rank, ranks, port):
    """Let rank 0 work alone and fail."""
    with joined(rank, ranks, port) as world:
        with world.alone("the work"):
            if world.first:
                raise ArithmeticError("planned")
        world.tell("")


def complain(rank, ranks, texts):
    """Return how a block ends that fails with ``texts`` on the ranks (None: no failure)."""
    world = World(rank, ranks, rank)
    try:
        with agreed(world):
            if texts[rank] is not None:
                raise click.UsageError(texts[rank])
    except click.ClickException as error:
        return error.format_message(), error.exit_code
    except click.exceptions.Exit as end:
        return "", end.exit_code
    return None


def talk_to_nobody(rank, ranks):
    """End rank 1 silently; return how rank 0 ends, which waits for it."""
    try:
        with joined_quietly(World(), cuda=False):
            if rank == 1:
                os._exit(7)
            World(rank, ranks, rank).tell("")
    except click.exceptions.Exit as end:
        return end.exit_code
    return None
