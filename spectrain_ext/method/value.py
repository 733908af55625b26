"""Method: a pipeline training method as a row of independent choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from spectrain_ext.operators import laws
from spectrain_ext.operators.corrections import Correction
from spectrain_ext.operators.numbers import Corrected
from spectrain_ext.schedule import Backward, Generator, Law, Place, Reads

from .formulas import RatesByDelay, as_late, delay, none

StageRule = Callable[[Place], int]
WindowRule = Callable[[int, int, int], int]  # (stage k, stages N, microbatches M) -> microbatches

FAMILIES = ("sgd", "adam", "adamw", "nadam", "muon")


@dataclass(frozen=True)
class Phase:
    """Another method from some moment of training on, after the pipeline has drained.

    Attributes:
        method: what then trains; it may change in turn.
        after: the minibatches of all training before it; None: only a gap begins it.
        gap: how far the weights that a forward of stage 0 reads may be from those that its backward
            updates: the norm of their difference by that of the latter. The first minibatch that
            exceeds it is followed by no other of the phase. None: it is not measured.
    """

    method: Method
    after: int | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Method:
    """A pipeline training method: a value, without code of its own.

    Versions and updates are those of one stage within one run, counted from 0. A rule is a function
    of the stage's ``Place``.

    Attributes:
        name: the name that ``Pipeline(method=...)`` accepts.
        summary: one line for people.
        schedule: the order of a stage's forwards, backwards and updates: a key of
            ``schedule.GENERATORS``, or a generator like those: a function from a ``Place`` to its
            endless actions. One that is an object may have ``window``, a rule as the next field is,
            and then no other can be chosen, and ``flushes``, whether it is synchronous.
        window: ``(k, N, M) -> w``, how many microbatches stage k of N may have in flight where a
            minibatch has M; None: what is usual for the schedule, N - k without a flush, and for a
            generator of your own. Of a stage with replicas N - k is the number of ranks from it on
            for each of them, and M is one replica's.
        forward_reads: the version that a forward starts from. ``"newest"``: all updates so far;
            ``"entry"``: as many as stage 0 had made when it began this microbatch (vertical sync);
            ``"previous"``: i - 1 for minibatch i, all but the last before it (PipeDream-2BW).
        law: how the weights some updates ahead follow. ``"linear"``, ``"geometric"`` and
            ``"second-order"`` are those of ``spectrain_ext.laws``; ``"difference"`` is
            ``W + s*(W - W_before)`` with the weights of one update before. ``"average"`` looks back
            instead: ``W - s*delta``, delta the average change of the weights in an update, which
            keeps exp(-2/s) of itself (PipeMare's T2); for ``backward="predict"`` alone. Or a
            function of s, at least 1, that gives a law as those of ``spectrain_ext.laws`` are: it
            has ``sgd`` and ``adam``, takes no gradient, and can be a key of a dict.
        forward_horizon: a rule for s, by how many updates the forward's weights are predicted
            ahead of the version it reads, 0 for the version itself; or ``"counted"``: exactly the
            updates until this microbatch's backward. The second-order law's delay.
        lead: a rule for the second-order law's lead, in updates; below 0 the momentum is followed
            less far than the delay, one update at least.
        backward: the weights that the backward meets. ``"current"``: the newest version;
            ``"predict"``: the newest version predicted ahead by ``backward_horizon`` (linearly,
            where the law is of second order); ``"stash"``: the very weights of its forward.
        backward_horizon: a rule for s of ``backward="predict"``.
        once: the forwards of all microbatches of a minibatch use the weights of the first (XPipe).
        direction: what the momentum has to be: None, any; ``"ema"``, an average
            (``SGD(ema=True)``).
        clip: a rule for the largest norm of a stage's gradient, None: not clipped.
        rates: a rule for a factor on the learning rates that the stage's t-th update of training
            has, counted from 0; None: 1.
        correction: a rule for what updates do otherwise as their gradients are late, one of
            ``spectrain_ext.corrections`` or None; None: nothing anywhere. Or an object that, as
            these do, has ``sgd`` and ``adam``, which give the step from the optimizer's numbers.
        families: the optimizers that the method is defined for, out of sgd, adam, adamw, nadam,
            muon; all of these stand for every other one as well.
        max_stages: the most stages that the method is defined for.
        min_microbatches: a rule for the fewest microbatches per minibatch.
        microbatches: how many a minibatch has on so many stages where nobody says; None: 1.
        otherwise: the law of a stage whose optimizer has no momentum that ``law`` could use, over
            horizon and lead together; None: such an optimizer is refused.
        chunks: stages v that a device has where nobody says: stage k of N lies on device k mod
            ceil(N/v).
        then: what all of this changes to in the course of training; None: nothing.
    """

    name: str
    summary: str
    schedule: str | Generator = "1f1b-async"
    window: WindowRule | None = None
    forward_reads: Reads = "newest"
    law: Law | Callable[[int], laws.Law] = "linear"
    forward_horizon: StageRule | Literal["counted"] = none
    lead: StageRule = none
    backward: Backward = "current"
    backward_horizon: StageRule = none
    once: bool = False
    direction: Literal["ema"] | None = None
    clip: Callable[[Place], float] | None = None
    rates: Callable[[Place, int], float] | None = None
    correction: Callable[[Place], Correction | Corrected | None] | None = None
    families: tuple[str, ...] = FAMILIES
    max_stages: int | None = None
    min_microbatches: StageRule | None = None
    microbatches: Callable[[int], int] | None = None
    otherwise: Literal["difference"] | None = None
    chunks: int = 1
    then: Phase | None = None


def phases_of(method: Method) -> tuple[Method, ...]:
    """The method as it begins, and whatever it changes to, in order; what cannot be is refused."""
    found = [method]
    while (phase := found[-1].then) is not None:
        where = named(method, "then")
        if not isinstance(phase, Phase) or not isinstance(phase.method, Method):
            raise TypeError(f"{where}: expected a Phase with a Method, got {phase!r}")
        if phase.after is None and phase.gap is None:
            raise ValueError(f"{where}: expected after or gap, got neither")
        if phase.after is not None:
            if isinstance(phase.after, bool) or not isinstance(phase.after, int):
                raise TypeError(f"{where}: after: expected an int, got {phase.after!r}")
            if phase.after < 0:
                raise ValueError(f"{where}: after: expected at least 0, got {phase.after}")
        if phase.gap is not None and not phase.gap > 0:
            raise ValueError(f"{where}: gap: expected a number > 0, got {phase.gap!r}")
        found.append(phase.method)
    return tuple(found)


def chunks_of(method: Method) -> int:
    """Stages of a device, in the phase that has the most."""
    return max(phase.chunks for phase in phases_of(method))


def factor_of(phases: Sequence[tuple[Method, Place]]) -> Callable[[int], float] | None:
    """What learning rates are multiplied by at an update of training; None: by nothing."""
    paced = [method.rates is not None and not _is_own(method, place) for method, place in phases]
    if not any(paced):
        return None
    first = phases[0][0]
    if any(method.then and method.then.gap is not None for method, _ in phases):
        raise ValueError(
            f"{named(first, 'then')}: gap: rates are counted from changes that are known "
            "before; expected after alone where a phase has rates"
        )

    def factor(update: int) -> float:
        begun = n = 0
        while (then := phases[n][0].then) and then.after is not None and update >= then.after:
            begun, n = max(begun, then.after), n + 1
        method, place = phases[n]
        return 1.0 if method.rates is None else rate_at(method, place, update - begun)

    return factor


def _is_own(method: Method, place: Place) -> bool:
    """Whether learning rates by delay are the optimizer's own, as the stage is hardly late."""
    late = delay(as_late(method.schedule, place))
    return isinstance(method.rates, RatesByDelay) and late <= 1


def rate_at(method: Method, place: Place, update: int) -> float:
    """What ``rates`` gives for an update, counted from the phase's first."""
    assert method.rates is not None
    return method.rates(as_late(method.schedule, place), update)


def named(method: Method, field: str, place: Place | None = None) -> str:
    """How an error begins that is about a field, everywhere or at one place."""
    at = "" if place is None else f" at stage {place.stage} of {place.stages}"
    return f"method: {field} of {method.name!r}{at}"


def at_least(method: Method, k: int, n: int, field: str, value: object, least: int) -> None:
    """Refuse what a rule gives for stage k of n if it is less, or no whole number."""
    where = f"{named(method, field)} gives {value!r} for stage {k} of {n}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}, expected an int")
    if value < least:
        raise ValueError(f"{where}, expected at least {least}")
