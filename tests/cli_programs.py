"""What the ranks of a comparison do in the tests of the command line, importable by the ranks."""

from __future__ import annotations

import os
from contextlib import contextmanager

import click
import torch
import torch.distributed as dist
from click.testing import CliRunner
from rank_pipelines import Faulty
from torch import nn

from spectrain_ext.cli import compare, main
from spectrain_ext.cli.world import World


def train(rank, ranks, port, *arguments):
    """Run ``spectrain train`` in the surroundings that torchrun makes; exit code and output."""
    dist.destroy_process_group()  # of the test: the command makes its own
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **where)
    done = CliRunner().invoke(main, ["train", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def train_failing(rank, ranks, port, culprit, *arguments):
    """The same with a stage that raises in its fourth forward; the output is that of the error."""
    build = compare.build_stages

    def faulty(*given):
        stages = build(*given)
        stages[culprit] = Faulty(stages[culprit], "exception", "forward", 3)
        return stages

    compare.build_stages = faulty
    # not returned: the groups would be left in order, and what is in flight waited for
    raise Told(*train(rank, ranks, port, *arguments))


class Told(Exception):
    """What a command said before it ended."""


@contextmanager
def joined(rank, ranks, port):
    """The world that torchrun would make."""
    dist.destroy_process_group()  # of the test: the world makes its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    world = World(rank, ranks, rank)
    with world.joined(cuda=False):
        yield world


def talk(rank, ranks, port):
    """What the ranks hear of each other."""
    stages = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(ranks)]
    with torch.no_grad():
        for tensor in stages[rank].state_dict().values():
            tensor.fill_(rank + 1)
    with joined(rank, ranks, port) as world:
        world.collect(stages)
        return {
            "told": world.tell({"from": rank, "text": "ä"}),
            "exchanged": world.exchange("ä" * rank),
            "sum": world.sum(rank + 1),
            "last": world.from_last([0.1, float("nan")] if rank == ranks - 1 else []),
            "state": [[float(t.sum()) for t in stage.state_dict().values()] for stage in stages],
        }


def collect_from_nobody(rank, ranks, port):
    """The last rank ends without a word, while the first one collects the stages."""
    stages = [nn.Linear(1000, 1000) for _ in range(ranks)]
    with joined(rank, ranks, port) as world:
        if rank == ranks - 1:
            os._exit(7)
        world.collect(stages)


def wait_for_the_first(rank, ranks, port):
    """Rank 0 works alone and fails there."""
    with joined(rank, ranks, port) as world:
        with world.alone("the work"):
            if world.first:
                raise ArithmeticError("planned")
        world.exchange("")


def complain(rank, ranks, texts):
    """How a block ends that fails with ``texts`` on the ranks, None: it does not fail."""
    world = World(rank, ranks, rank)
    try:
        with world.agreed():
            if texts[rank] is not None:
                raise click.UsageError(texts[rank])
    except click.ClickException as error:
        return error.format_message(), error.exit_code
    except click.exceptions.Exit as end:
        return "", end.exit_code
    return None


def talk_to_nobody(rank, ranks):
    """Rank 1 ends without a word; how rank 0 ends, which waits for it."""
    if rank == 1:
        os._exit(7)
    try:
        World(rank, ranks, rank).exchange("")
    except click.exceptions.Exit as end:
        return end.exit_code
    return None
