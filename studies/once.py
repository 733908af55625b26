"""Reports messages of several processes of one command once, in readable form."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.logging import RichHandler

from spectrain_ext.errors import CheckpointError, RankError, StageError

from .options import OptionError
from .world import World

_LOGGERS = ("spectrain_ext", "studies")
_logger = logging.getLogger(__name__)


class OnceToldCommand(click.Command):
    """A command that reports usage errors only on the first of several processes."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except click.UsageError as error:
            if World.of_environment().first:
                raise
            raise click.exceptions.Exit(error.exit_code) from error


@contextmanager
def joined(world: World, cuda: bool) -> Iterator[None]:
    """Enter ``world.joined`` and report its failures as failures of the command."""
    with ExitStack() as stack:
        try:
            stack.enter_context(world.joined(cuda))
        except OSError as error:
            raise click.ClickException(str(error)) from error
        try:
            yield
        except ConnectionError as error:  # from a rank that ended and reported why
            _logger.info("another process has ended: %s", error)
            raise click.exceptions.Exit(1) from error


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Make the block fail on all ranks or on none, and report every distinct reason once."""
    error: click.ClickException | None = None
    cause: Exception | None = None
    try:
        yield
    except OptionError as caught:
        error, cause = click.BadParameter(str(caught), param_hint=f"'--{caught.option}'"), caught
    except (ModuleNotFoundError, ValueError, OSError) as caught:
        error, cause = click.ClickException(str(caught)), caught
    except click.ClickException as caught:
        error = caught
    reasons = world.tell("" if error is None else error.format_message())
    if not any(reasons):
        return
    if error is None or reasons.index(reasons[world.rank]) != world.rank:
        raise click.exceptions.Exit(1 if error is None else error.exit_code)
    if len(set(reasons)) == 1:
        raise error from cause
    kind = click.UsageError if isinstance(error, click.UsageError) else click.ClickException
    raise kind(f"rank {world.rank}: {error.format_message()}") from cause


@contextmanager
def told(world: World, console: Console, folder: Path) -> Iterator[None]:
    """Report training failures of the block in readable form, on the right rank."""
    try:
        yield
    except (StageError, RankError, CheckpointError) as error:
        if _tells(world, error):
            raise click.ClickException(_in_words(error)) from error
        raise click.exceptions.Exit(1) from error
    except KeyboardInterrupt:
        kept = f"Finished runs are kept. To go on: the same again, with --out {folder}"
        console.print(kept)
        if world.first:
            raise
        raise click.exceptions.Exit(1) from None


def _tells(world: World, error: BaseException) -> bool:
    """Return whether this rank reports a failure: its own, or, on the lowest rank left, another's.

    The failed rank may have been killed, and torchrun may kill any other rank as soon as it ended.
    Together they report the failure once or twice.
    """
    if isinstance(error, CheckpointError):  # the same on all ranks
        return world.first
    if not isinstance(error, RankError):
        return True
    return world.rank == min(rank for rank in range(world.size) if rank != error.culprit)


def _in_words(error: StageError | RankError | CheckpointError) -> str:
    cause = error.__cause__
    if cause is None or not isinstance(error, StageError):  # other ranks hold the cause as text
        return str(error)
    return f"{error} ({type(cause).__name__}: {cause})"


@contextmanager
def logged(on: bool, console: Console, world: World) -> Iterator[None]:
    """Show the log inside the block: rank 0's around its progress bar, the others' on stderr."""
    if not on:
        yield
        return
    handler: logging.Handler
    if world.first:
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        form = f"%(asctime)s rank {world.rank} %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(form))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
