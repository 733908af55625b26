"""Defines ``Method``: a training method as a set of independent choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from spectrain_ext.errors import check_int
from spectrain_ext.operators import laws
from spectrain_ext.schedule import Backward, Generator, Law, Place, Reads, ScheduleName

from .formulas import RatesByDelay, as_late, delay, none

if TYPE_CHECKING:
    from spectrain_ext.operators.numbers import Corrected

StageRule = Callable[[Place], int]
WindowRule = Callable[[int, int, int], int]  # (stage k, stages N, microbatches M) -> microbatches
#: A window setting: None (the method's), a name, one for all stages, or one per stage.
Window = Literal["classic", "wide"] | int | Sequence[int] | None

Family = Literal["sgd", "adam", "adamw", "nadam", "muon"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True)
class Phase:
    """Another method from some moment of training on, after the pipeline has drained.

    Attributes:
        method: the next method; it may change in turn.
        after: minibatches of all training before the change.

    Example:
        >>> then = st.Phase(st.spectrain(), after=100)
        >>> method = st.Method("mine", "1F1B, then SpecTrain", schedule="1f1b", then=then)
        >>> method.then.method.name
        'spectrain'
    """

    method: Method
    after: int


@dataclass(frozen=True)
class Method:
    """A pipeline training method: a value, without code of its own.

    Versions and updates are those of one stage within one run, counted from 0. A rule is a function
    of the stage's ``Place``.

    Attributes:
        name: the name that ``Pipeline(method=...)`` accepts.
        summary: one line of description.
        schedule: the order of a stage's forwards, backwards and updates: a key of
            ``schedule.GENERATORS`` or a generator, a function from a ``Place`` to endless
            instructions. An object may have ``window``, a rule like the next field, which then
            cannot be chosen, and ``flushes``, whether it is synchronous.
        window: ``(k, N, M) -> w``, the microbatches that stage k of N may have in flight if a
            minibatch has M. None: the schedule's usual one, N - k without a flush and for your own
            generators. With replicas N - k is the number of ranks from the stage on, per replica,
            and M is one replica's share.
        forward_reads: the version that a forward starts from. ``"newest"``: all updates so far;
            ``"entry"``: stage 0's when it began the microbatch (vertical sync); ``"previous"``:
            version i - 1 for minibatch i (PipeDream-2BW). The difference law predicts these too.
        law: the prediction law. ``"linear"``, ``"geometric"`` and ``"second-order"`` are those of
            ``spectrain_ext.laws``. ``"difference"`` is ``W + s*(W - W_before)`` with the weights
            before the last update. ``"average"``, for ``backward="predict"`` only, looks back, to
            ``W - s*delta``: delta is the average change per update, which keeps exp(-2/s) of itself
            (PipeMare's T2). Or a function of s >= 1 that returns a law of your own: hashable, with
            ``sgd`` and ``adam``, without the gradient.
        forward_horizon: a rule for s, the updates by which the forward's weights are predicted
            ahead of the version it reads; 0: the version itself. Or ``"counted"``: exactly the
            updates until this microbatch's backward. For the second-order law: the delay.
        lead: a rule for the second-order law's lead, in updates. Negative values shorten the
            prediction, to one update at least.
        backward: the weights that the backward reads. ``"current"``: the newest version;
            ``"predict"``: the newest version predicted by ``backward_horizon`` (linearly if the law
            is of second order); ``"stash"``: its forward's weights.
        backward_horizon: a rule for s of ``backward="predict"``.
        once: all microbatches of a minibatch use the first one's forward weights (XPipe).
        smoothed: the method needs the momentum of ``SGD(smoothed=True)``.
        clip: a rule for the largest norm of a stage's gradient; None: no clipping.
        rates: ``(place, t) -> factor`` on the stage's learning rates in the update of minibatch t
            of the phase, from 0, and in predictions before it; parameter groups keep their ``lr``.
            None: 1.
        correction: a rule for what replaces the coefficients of a stage's steps:
            ``spectrain_ext.corrections.SpikeCompensation``, an object with ``sgd`` and ``adam``
            that return the whole step as a ``Term``, or None.
        passes: optional behaviours of this method, which the pipeline's own come before, such as
            the other ``spectrain_ext.corrections``: values of ``spectrain_ext.passes.Pass``.
        families: the optimizers that the method supports, of sgd, adam, adamw, nadam, muon. All of
            them stand for any optimizer.
        max_stages: the largest number of stages; None: no limit.
        min_microbatches: a rule for the smallest number of microbatches per minibatch.
        microbatches: ``N -> M``, the default number of microbatches; None: 1.
        otherwise: the law of a stage whose optimizer has no momentum for ``law``, over horizon plus
            lead; None: refuse such an optimizer.
        chunks: the default number v of stages on a device: stage k of N is on device k mod
            ceil(N/v). A method that changes has one for all its phases.
        then: the next method in the course of training; None: none.

    Example:
        >>> method = st.Method(
        ...     "mine",
        ...     "predict over half of the delay, reuse those weights in the backward",
        ...     forward_horizon=lambda place: (place.window - 1) // 2,
        ...     backward="stash",
        ... )
        >>> stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        >>> pipe = st.Pipeline(stages, st.optim.SGD, nn.functional.mse_loss, method=method)
    """

    name: str
    summary: str
    schedule: ScheduleName | Generator = "1f1b-async"
    window: WindowRule | None = None
    forward_reads: Reads = "newest"
    law: Law | Callable[[int], laws.Law] = "linear"
    forward_horizon: StageRule | Literal["counted"] = none
    lead: StageRule = none
    backward: Backward = "current"
    backward_horizon: StageRule = none
    once: bool = False
    smoothed: bool = False
    clip: Callable[[Place], float] | None = None
    rates: Callable[[Place, int], float] | None = None
    correction: Callable[[Place], Corrected | None] | None = None
    passes: Sequence[Any] = ()
    families: tuple[Family, ...] = FAMILIES
    max_stages: int | None = None
    min_microbatches: StageRule | None = None
    microbatches: Callable[[int], int] | None = None
    otherwise: Literal["difference"] | None = None
    chunks: int = 1
    then: Phase | None = None

    def __repr__(self) -> str:
        """Show what differs from the defaults, and functions by their names."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        different = ((name, value) for name, value, default in values if value != default)
        shown = (f"{n}={getattr(value, '__qualname__', repr(value))}" for n, value in different)
        return f"Method({', '.join(shown)})"


def phases_of(method: Method) -> tuple[Method, ...]:
    """Return the method and those that it changes to, in order; refuse impossible phases."""
    phases = [method]
    while (then := phases[-1].then) is not None:
        where = named(phases[-1], "then")
        if not isinstance(then, Phase) or not isinstance(then.method, Method):
            raise TypeError(f"{where}: expected a Phase with a Method, got {then!r}")
        check_int(f"{where}: after", then.after, 0)
        phases.append(then.method)
    return tuple(phases)


def correction_at(method: Method, place: Place) -> Corrected | None:
    if method.correction is None:
        return None
    correction = method.correction(as_late(method.schedule, place))
    if correction is None:
        return None
    rules = (getattr(correction, name, None) for name in ("sgd", "adam"))
    if isinstance(correction, type) or not all(map(callable, rules)):
        raise TypeError(
            f"{named(method, 'correction', place)}: expected an object with sgd and adam, which "
            f"give a step as a Term, got {correction!r}; what changes gradients goes into passes="
        )
    return correction


def rate_at(method: Method, place: Place, update: int) -> float:
    """Return the factor of ``rates`` at an update, counted from the method's first."""
    return 1.0 if method.rates is None else method.rates(as_late(method.schedule, place), update)


def factor_of(method: Method, place: Place, done: int = 0) -> Callable[[int], float] | None:
    """Return the factor on learning rates, by update after ``done`` others; None: always 1."""
    changes = method.rates is not None
    if isinstance(method.rates, RatesByDelay):
        changes = delay(as_late(method.schedule, place)) > 1
    return (lambda update: rate_at(method, place, done + update)) if changes else None


def named(method: Method, field: str, place: Place | None = None) -> str:
    """Return how an error about a field begins."""
    at = "" if place is None else f" at stage {place.stage} of {place.stages}"
    return f"method: {field} of {method.name!r}{at}"
