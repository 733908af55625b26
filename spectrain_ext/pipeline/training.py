"""Trains on the batches of one ``Pipeline.run``: by one method, or by those of a hybrid."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from spectrain_ext.interrupts import deferred
from spectrain_ext.method import rules_at
from spectrain_ext.transport import callers_stream

from .arguments import check_mode
from .loops import Segment, segments
from .losses import Keep, Result

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
    pipe._warn_of_evaluation()
    _logger.info("run begins: %s, %s", pipe.method.name, pipe._describe_stages())
    try:
        with pipe._callers_loop, ExitStack() as watched:
            if observers:
                from .observer import observing

                like = next(iter(pipe.optimizers), None)
                rules = [rules_at(pipe.method, place, like) for place in pipe._applied.places]
                watched.enter_context(observing(observers, rules, pipe.devices))
            if pipe.method.then is None:
                yield from pipe._train(batches, observers, keep)
            else:
                yield from _by_methods_in_turn(pipe, batches, observers, keep)
    except GeneratorExit:
        _logger.info("run ended, left by the caller: %s", pipe._describe_stages())
        raise
    except BaseException as error:
        _logger.error("run failed: %s: %s", type(error).__name__, error)
        raise
    _logger.info("run ended: %s", pipe._describe_stages())


def follow_method(pipe: Any) -> None:
    """Let weights and edges follow the method that training has reached."""
    with deferred():
        try:
            for stage in pipe._wires.stages:
                stage.check_flags()
        except RuntimeError:
            with pipe._processes.during(pipe._wires):  # tells the others
                raise
        now = pipe._applied
        pipe._use_passes(now, pipe._wires.stages)
        pipe._wires.follow(now)
        for stage in pipe._wires.stages:
            weights = stage.weights
            if weights is None:
                continue
            # Each stage knows what it follows: an interrupt may have come between two of them.
            settings = now.followed_by(stage.index, weights.optimizer)
            if settings != weights.followed:
                callers_stream(stage.device).lend(weights.buffers())
                weights.follow(*settings)
            if not weights.bound:
                weights.bind()
        for copy in pipe._copies:
            copy.bind()


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

    return segments(batches, ends, lambda each: pipe._train(each, observers, keep), follow)
