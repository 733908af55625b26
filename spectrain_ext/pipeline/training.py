"""Trains on the batches of one ``Pipeline.run``: by one method, or by those of a hybrid."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from spectrain_ext.method import rules_at

from .arguments import check_mode, evaluating_part
from .compute import Mode
from .loops import Segment, keeping, segments
from .losses import Keep, Result
from .run import Run, Work

if TYPE_CHECKING:
    from .observer import Observer

_logger = logging.getLogger(__name__)


def trained(
    pipe: Any,
    batches: Iterator[object],
    observers: Sequence[Observer],
    keep: Keep | None,
    begun: list[bool],  # becomes true with the first step
) -> Iterator[Result]:
    """Train, and yield the results; see ``Pipeline.run``."""
    begun.append(True)
    pipe._refuse_in_run("run")
    check_mode("run", pipe.devices)
    _warn_of_evaluation(pipe)
    _logger.info("run begins: %s, %s", pipe.method.name, pipe._describe_stages())
    try:
        with keeping(pipe._callers_loop), ExitStack() as watched:
            if observers:
                from .observer import observing

                like = next(iter(pipe.optimizers), None)
                rules = [rules_at(pipe.method, place, like) for place in pipe._applied.places]
                watched.enter_context(observing(observers, rules, pipe.devices))
            of_methods = _by_one_method if pipe.method.then is None else _by_methods_in_turn
            yield from of_methods(pipe, batches, observers, keep)
    except GeneratorExit:
        _logger.info("run ended, left by the caller: %s", pipe._describe_stages())
        raise
    except BaseException as error:
        _logger.error("run failed: %s: %s", type(error).__name__, error)
        raise
    _logger.info("run ended: %s", pipe._describe_stages())


def _warn_of_evaluation(pipe: Any) -> None:
    """Warn once: ``train()`` of the uncut model may not reach the stages of a cut."""
    if pipe._warned:
        return
    for stage in pipe._wires.stages:
        name = evaluating_part(stage.module)
        if name is not None:
            pipe._warned = True
            part = f": {name!r}" if name else ""
            warnings.warn(
                f"run: stages[{stage.index}]{part} is in evaluation mode: it trains without "
                "dropout and with fixed running statistics; call train() of the pipeline "
                "(that of the model that was cut may not reach its stages)",
                stacklevel=3,
            )
            return


def _by_one_method(
    pipe: Any, batches: Iterable[object], observers: Sequence[Observer], keep: Keep | None
) -> Iterator[Result]:
    pipe._follow_method()
    work = Work(
        mode=Mode.TRAIN,
        call=pipe._loss_fn,
        has_count=pipe._batches.count is not None,
        minibatches=pipe.minibatches,
        done=pipe.minibatches - pipe._reached()[1],
        keep=keep,
        observers=observers,
    )
    run = pipe._training = Run(pipe._wires, pipe._processes, work, pipe._callers_loop)
    # Held here: an interrupt between two results must not end it while the stack unwinds.
    results = run.iterate(pipe._with_columns(iter(batches), several=False))
    try:
        yield from results
    finally:
        pipe.minibatches += run.begun


def _by_methods_in_turn(
    pipe: Any, batches: Iterator[object], observers: Sequence[Observer], keep: Keep | None
) -> Iterator[Result]:
    """Train until the method of a hybrid changes, drain, and go on by the next one."""
    earlier, then = pipe.minibatches, pipe.method.then

    def ends(taken: int) -> bool:
        return then is not None and pipe.minibatches + taken >= then.after

    def follow(segment: Segment, left: bool) -> int | None:
        nonlocal then
        # Whether there are more batches is known to the first process, which takes them.
        more, doing = (lambda: segment.cut and not left), "changing the method"
        if then is None or not pipe._gather_from_ranks(more, doing)[0]:
            return None
        then = pipe.method.then
        _logger.info("minibatch %d: method is now %s", pipe.minibatches, pipe.method.name)
        return int(pipe.minibatches - earlier)

    return segments(batches, ends, lambda each: _by_one_method(pipe, each, observers, keep), follow)
