"""Simulates the runs of methods, and lists the instructions of a stage."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from spectrain_ext.method import (
    Method,
    MethodName,
    Window,
    find_method,
    microbatches_of,
    phases_on,
    places_of,
    rules_at,
)
from spectrain_ext.schedule import (
    Entries,
    Kind,
    Ledger,
    bounded,
    find_generator,
    plain_steps,
    steps,
)
from spectrain_ext.tools.simulation import Durations, Span, simulate, streams

_LOADS = (Kind.LOAD_FORWARD, Kind.LOAD_BACKWARD, Kind.LOAD_BACKWARD_INPUT)


def simulate_method(
    method: MethodName | str | Method,
    stages: int,
    minibatches: int,
    *,
    microbatches: int | Literal["auto"] = "auto",
    window: Window = None,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    update: float = 0.0,
    prediction: float = 0.0,
    communication: float = 0.0,
    inbound: bool = False,
) -> Iterator[Span]:
    """Simulate a run with a method, in all its phases.

    All durations have one unit, and hold for all stages or for each. A device has as many stages as
    the method's ``chunks``.

    Args:
        microbatches: per minibatch; ``"auto"``: the method's usual number.
        window: as for ``Pipeline``.
        forward: duration of a microbatch's forward.
        backward: duration of a microbatch's backward.
        prediction: duration of a prediction, where the method predicts.
        communication: duration of a message to a neighbouring stage.
        inbound: whether all messages to a device share one wire; see ``Durations``.

    Raises:
        ValueError: an argument is out of range, or the method does not support these.

    Example:
        >>> from spectrain_ext.tools.timelines import simulate_method
        >>> for span in simulate_method("pipedream", 2, 1):
        ...     if span.end > span.start:
        ...         print(span.stage, span.kind.value, span.start, span.end)
        0 forward 0.0 1.0
        1 forward 1.0 2.0
        1 backward 2.0 4.0
        0 backward 4.0 6.0
    """
    method = find_method(method)
    for name, value in (("stages", stages), ("minibatches", minibatches)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if microbatches == "auto":
        microbatches = microbatches_of(method, stages)
    runs: list[tuple[int, Callable[..., Iterator[Span]]]] = []
    devices = devices_under(method, stages)
    for phase, places in phases_on(method, stages, microbatches, window):
        rules = [rules_at(phase, place) for place in places]
        durations = Durations.of(
            stages,
            forward=forward,
            backward=backward,
            update=update,
            load_forward=[prediction if r.forward_horizon or r.lead else 0.0 for r in rules],
            load_backward=[prediction if r.backward_horizon else 0.0 for r in rules],
            activation=communication,
            gradient=communication,
            inbound=inbound,
        )
        actions = streams(phase.schedule, [place.window for place in places], microbatches)
        run = partial(simulate, actions, durations, rules=rules, devices=devices)
        runs.append((phase.then.after if phase.then else minibatches, run))

    def one_by_one() -> Iterator[Span]:  # the pipeline drains between two phases
        done, start = 0, 0.0
        for after, run in runs:
            end, last = max(done, min(minibatches, after)), start
            for span in run(minibatches=end - done) if end > done else ():
                last = max(last, start + span.end)
                yield span._replace(
                    minibatch=done + span.minibatch,
                    start=start + span.start,
                    end=start + span.end,
                    version=None if span.version is None else done + span.version,
                )
            done, start = end, last

    return one_by_one()


def devices_under(method: str | Method, stages: int) -> list[int] | None:
    """Return the device of every stage, in all phases; None: each has its own."""
    chunks = find_method(method).chunks
    devices = -(-stages // min(chunks, stages))
    return [k % devices for k in range(stages)] if chunks > 1 else None


def instructions_of(
    method: MethodName | str | Method,
    stages: int,
    stage: int,
    minibatches: int,
    *,
    microbatches: int | Literal["auto"] = "auto",
    window: Window = None,
) -> Iterator[str]:
    """Return a line per instruction of a stage, with the weight versions it loads.

    Of a method that changes, these are the instructions of its first phase.
    """
    method = find_method(method)
    if not 0 <= stage < stages:
        raise ValueError(f"stage: expected one of 0 to {stages - 1}, got {stage}")
    parts = microbatches_of(method, stages) if microbatches == "auto" else microbatches
    places = places_of(method, stages, parts, window)
    place, generate = places[stage], find_generator(method.schedule)
    ledger = Ledger(
        stage,
        rules_at(method, place),
        microbatches=parts,
        entries=Entries(generate(places[0])),
    )
    handled = plain_steps(place)
    for instruction in bounded(generate(place), stage, minibatches):
        version, horizon = ledger.enter(instruction)
        kind, i, j = instruction
        for step in steps(kind, handled, first=not j):
            line = f"{step.value:<36} {i}"
            if parts > 1 and step not in (Kind.PULL, Kind.UPDATE):
                line += f".{j}"
            if step in _LOADS:
                ahead = f", predicted {horizon} ahead" if horizon else ""
                line = f"{line:<44} version {version}{ahead}"
            elif step is Kind.UPDATE:
                line = f"{line:<44} makes version {version}"
            yield line
