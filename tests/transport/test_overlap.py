"""Tests what a run on several devices orders, and so what may overlap; no device is needed."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path

import pytest
from helpers.overlap_picture import draw
from helpers.pipeline_cases import batches, float64, mse, sgd, tanh_stages  # noqa: F401
from helpers.recorded_streams import recorded
from torch.optim.lr_scheduler import ExponentialLR

import spectrain_ext as st
from spectrain_ext.method import find_method, rules_at
from spectrain_ext.schedule import Kind, bounded, put_off
from spectrain_ext.tools.simulation import Durations, simulate, streams
from spectrain_ext.transport import NO_HEADER, Edge

F, B, UPDATE, LOSS, PULL = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.LOSS, Kind.PULL
ACTIVATION, GRADIENT = Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT
LOADS = {F: Kind.LOAD_FORWARD, B: Kind.LOAD_BACKWARD}
MINIBATCHES = 20


class Run:
    """The record of a second run, in the steady state from its first minibatch on."""

    def __init__(
        self, name, n, m, *, batches_on=None, places=None, use=lambda result: None, **more
    ):
        self.method, self.n, self.m = find_method(name), n, m
        more.setdefault("loss_fn", mse)
        with recorded(places or range(n), batches_on) as self.record:
            made = st.Pipeline(tanh_stages(n), sgd(), method=name, microbatches=m, **more)
            list(made.run(batches(2 * n + 2, size=2 * m)))
            self.record.train(made, batches(MINIBATCHES, size=2 * m), use)
        self.places = made.places
        self.rules = [rules_at(self.method, place) for place in self.places]
        self.works = defaultdict(list)  # by step
        for work in self.record.works:
            kind = work.step and work.step[1]
            if kind and (work.reads or work.writes) and not work.by_caller:
                key = ("targets",) if kind is PULL and "loss" in work.lane.name else ()
                self.works[work.step + key].append(work)

    def instructions(self):
        windows = [place.window for place in self.places]
        return streams(self.method.schedule, windows, self.m)

    def simulated(self, durations):
        return simulate(self.instructions(), durations, minibatches=MINIBATCHES, rules=self.rules)


once = cache(Run)

CASES = [
    *(("auto", n, m) for n in (2, 3, 4) for m in (1, n, 2 * n - 1)),
    *(("spectrain", n, m) for n in (2, 3, 4) for m in (1, 2)),
    ("pipedream", 3, 1),  # copies a version before the update
    ("1f1b", 3, 3),
]


# The definition.


def chains(run):
    """Yield lists of steps in order: what the data, a device or a piece of memory requires."""
    n, m, steps = run.n, run.m, run.works
    version = {span[:1] + span[2:5]: span.version for span in run.simulated(Durations.of(n))}
    for k, instructions in enumerate(run.instructions()):
        computed, written, sent = [], [], {ACTIVATION: [], GRADIENT: []}
        for kind, i, j in bounded(instructions, k, MINIBATCHES):
            turn, load = (k, kind, i, j), (k, LOADS.get(kind), i, j)
            if kind is UPDATE:
                written.append(turn)
                yield from ([(k, B, i, q), turn] for q in range(m))
                continue
            # A stage computes with weights that an update has made, or a prediction from them.
            if version[turn]:
                yield [(k, UPDATE, version[turn] - 1, 0), turn]
            if load in steps:
                written.append(load)
                yield [load, turn]
                if not run.rules[k].retains(m) and computed:  # one memory for all predictions
                    yield [*computed[-2:], load]
            # It receives, and sends what it has computed.
            before, message = (k - 1, ACTIVATION) if kind is F else (k + 1, GRADIENT)
            yield [(before, message, i, j), turn]
            send = ACTIVATION if kind is F else GRADIENT
            yield [turn, (k, send, i, j)]
            # Memory of gradients: those of weights are written again after the update. Those sent
            # before the last ones are freed, after their copy, before the next work.
            if kind is B and not j and i:
                yield [(k, UPDATE, i - 1, 0), turn]
            if computed and computed[-1][1] is B and len(sent[GRADIENT]) > 1:
                yield [sent[GRADIENT][-2], turn]
            computed += [turn, (k, LOSS, i, j)] if kind is F else [turn]
            sent[send].append((k, send, i, j))
        # A device computes in turn, writes weights in turn, and a wire carries one message.
        yield from (computed, written, *sent.values())
    # Batches come in turn, into as much memory as the window needs.
    ahead = -(-run.places[0].window // m) + 1
    late = put_off(run.method.schedule, run.places[0])  # and those whose backward is going on
    pulls = [(0, PULL, i, 0) for i in range(MINIBATCHES)]
    inputs = list(chain.from_iterable(((*pull, "input", j) for j in range(m)) for pull in pulls))
    yield from (inputs, [(*pull, "targets") for pull in pulls])
    for q, pull in enumerate(inputs):
        yield [pull, (0, F, *divmod(q, m))]
        if q >= ahead * m + late:
            yield [(0, B, *divmod(q - ahead * m - late, m)), pull]
    for i, pull in enumerate(pulls):
        yield [(*pull, "targets"), (n - 1, LOSS, i, 0)]
        if i >= ahead + late:
            yield [(n - 1, B, i - ahead - late, m - 1), (*pull, "targets")]


def compare(run):
    """The record orders two works if and only if the definition does; count them."""
    works = {**run.works}
    for i in range(MINIBATCHES):
        works |= {(0, PULL, i, 0, "input", j): [w] for j, w in enumerate(works[0, PULL, i, 0])}
    before = defaultdict(set)
    for steps in chains(run):
        for earlier, later in pairwise(chain.from_iterable(works.get(s, ()) for s in steps)):
            assert earlier.number < later.number
            before[later].add(earlier)
    recorded, needed = run.record.order(), run.record.order(before.__getitem__)
    those = {1 << work.number: work for of_step in run.works.values() for work in of_step}
    mask = sum(those)
    for work in those.values():
        extra, lacking = recorded[work] & mask & ~needed[work], needed[work] & ~recorded[work]
        for bits, what in ((extra, "needless"), (lacking, "missing")):
            assert not bits, f"{what}: {those[bits & -bits]} before {work}"
    return len(those), sum(needed[work].bit_count() for work in those.values())


@pytest.mark.parametrize(("name", "n", "m"), CASES)
def test_a_run_is_ordered_as_the_definition_requires_and_no_more(name, n, m):
    works, pairs = compare(once(name, n, m))
    assert works > MINIBATCHES * (n + m * (4 * n - 1)) and pairs < works * (works - 1) / 2


# Times.


def lengths(run, seed, longest=9):
    """Return random durations as a simulation takes them, and a function of a recorded work."""
    draw = random.Random(seed).randint
    takes = {kind: [draw(1, 9) for _ in range(run.n)] for kind in (F, B, UPDATE, LOADS[B])}
    takes |= {kind: [draw(0, longest) for _ in range(run.n)] for kind in (ACTIVATION, GRADIENT)}
    predicted = [
        length if rules.backward_horizon not in (0, rules.forward_horizon) else 0
        for length, rules in zip(takes[LOADS[B]], run.rules, strict=True)
    ]
    durations = Durations.of(
        run.n,
        **{"forward": takes[F], "backward": takes[B], "update": takes[UPDATE]},
        **{"activation": takes[ACTIVATION], "gradient": takes[GRADIENT]},
        load_backward=predicted,
    )

    def duration(work):
        length = takes.get(work.step[1] if work.step else None)
        return length[work.step[0]] if length and work.writes else 0

    return durations, duration


def spans_of(times):
    return {work.step: time for work, time in times.items() if work.step and not work.by_caller}


def differing(run, seed, longest=9, left_out=lambda earlier, later: False):
    """Count, by kind, spans that are not when the simulator says; and how much later all ends."""
    durations, duration = lengths(run, seed, longest)
    found = spans_of(run.record.times(duration, left_out))
    simulated = {s[:1] + s[2:5]: (s.start, s.end) for s in run.simulated(durations)}
    assert {step[1] for step in simulated} >= {F, B, UPDATE, ACTIVATION, GRADIENT}
    late = Counter(step[1] for step, span in simulated.items() if found[step] != span)
    ends = [max(end for _, end in each.values()) for each in (found, simulated)]
    return late, ends[0] - ends[1]


@pytest.mark.parametrize(("name", "n", "m"), CASES)
def test_every_work_begins_and_ends_when_the_simulator_says(name, n, m):
    """With a window for messages a copy that lasts longer than a backward may delay the work that
    gets its memory, and the end of the run by no more than itself."""
    run, nothing = once(name, n, m), (Counter(), 0)
    wide = run.places[0].window > n

    def frees_gradients(earlier, later):
        return later.conflicts.get(earlier) == ("WAR", "gradients of the input")

    delayed = 0
    for seed in range(3):
        assert differing(run, seed, longest=1) == nothing
        for longest in (9, 90):
            kinds, later = differing(run, seed, longest)
            assert (wide and later <= longest) or not kinds
            delayed += len(kinds)
            assert differing(run, seed, longest, frees_gradients) == nothing
    assert wide == (delayed > 0)


# Other features: works wait for each other only where they use the same memory.


def needless(run):
    """Return the kinds of pairs that the record orders although no use of memory requires it."""
    last, found = {}, set()

    def needed(work):
        earlier = {last[work.lane]} if work.lane in last else set()
        last[work.lane] = work
        return earlier.union(work.conflicts)

    order = run.record.order(needed)
    for work, before in order.items():
        for other in work.after:
            # What the caller has done before the run, and does with a result, is its own affair.
            if (
                other in order
                and other.step
                and work.step
                and not work.by_caller
                and not before >> other.number & 1
            ):
                found.add((other.step[1], work.step[1]))
    return found


FEATURES = {
    "spectrain-local, rates that change": dict(
        name="spectrain-local", scheduler=partial(ExponentialLR, gamma=0.9)
    ),
    "a prediction by differences": dict(name="lwp-w"),
    "two versions": dict(name="pipedream-2bw", m=3),
    "halves": dict(name="zb-h1-async"),
    "a norm of all stages": dict(name="1f1b", clip_norm=0.1),
    "a norm per stage": dict(name="auto", clip_norm=0.1),
    "several stages on a device": dict(name="interleaved-async", n=4, places=[0, 1, 0, 1]),
    "batches on the first device": dict(name="auto", batches_on=0),
    "batches on the last device": dict(name="auto", batches_on=2),
    "codes": dict(name="auto", passes=[st.passes.Compress(st.codecs.Int8())]),
    "offload": dict(name="auto", passes=[st.passes.OffloadActivations()]),
    "recomputation": dict(name="auto", recompute=True),
}


KNOWN = {
    "recomputation": {(GRADIENT, Kind.RECOMPUTE)},  # only then does a stage hold the graph again
    "codes": {(GRADIENT, UPDATE)},  # a gradient is coded before the update begins
}


@pytest.mark.parametrize("feature", FEATURES)
def test_other_features_order_what_uses_the_same_memory(feature):
    run = Run(**{"n": 3, "m": 2, **FEATURES[feature]})
    assert needless(run) == KNOWN.get(feature, set()) and not run.record.waits
    assert not races(run)


def races(run):
    """Return works that use the same memory as an earlier one, which nothing orders before."""
    order = run.record.order()
    return [
        (earlier, work, *why)
        for work in run.record.works
        for earlier, why in work.conflicts.items()
        if earlier in order and not order[work] >> earlier.number & 1
    ]


#: Not these: one has a single stage, the other another optimizer.
DRAWN = sorted({*st.methods()} - {"xgrad", "spectrain-smoothed"})


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("name", DRAWN)
def test_every_method_orders_all_uses_of_memory(name, m):
    method = find_method(name)
    if m == 1 and method.min_microbatches is not None:
        pytest.skip(f"{name} needs several microbatches")
    run = Run(name, 4, m, places=[0, 1, 0, 1] if method.chunks > 1 else None)
    assert run.works and not races(run)


def test_a_race_is_noticed(monkeypatch):
    monkeypatch.setattr(Edge, "receive", lambda edge: edge.arrived.popleft())
    assert races(Run("auto", 3, 3))


# Overlap.


@pytest.mark.parametrize(("name", "n", "m"), [("auto", 3, 3), ("auto", 3, 5), ("spectrain", 4, 1)])
def test_copies_have_streams_of_their_own_and_may_run_beside_everything_else(name, n, m):
    run = once(name, n, m)
    order = run.record.order()

    def free(one, other):
        first, second = sorted((one, other), key=lambda work: work.number)
        return not order[second] >> first.number & 1

    lanes = defaultdict(set)
    for work in run.record.works:
        if work.reads or work.writes:
            k, kind = work.step[:2] if work.step else (0, None)
            copies = kind in (ACTIVATION, GRADIENT, PULL)
            lanes[work.lane].add((k, kind) if copies else "no copies")
            assert kind not in (ACTIVATION, GRADIENT) or work.lane.device.index == k
    assert all(len(uses) == 1 for uses in lanes.values())
    for i in range(2, MINIBATCHES - n):
        for k in range(n):
            (update,) = run.works[k, UPDATE, i, 0]  # with the prediction of the next forward
            assert any("weights" in name for name in update.writes)
            if k:  # beside the gradient that the same backward sends, and an activation
                assert free(update, run.works[k, GRADIENT, i, m - 1][0])
            sends = [run.works[k, ACTIVATION, x, q] for x in range(MINIBATCHES) for q in range(m)]
            assert k == n - 1 or any(free(update, send) for (send,) in sends)
            if run.works[k, LOADS[B], i, 0]:  # beside the gradient that it waits for
                assert free(run.works[k, LOADS[B], i, 0][0], run.works[k + 1, GRADIENT, i, 0][0])


# The CPU.


@pytest.mark.parametrize(("name", "n", "m"), [("auto", 3, 3), ("spectrain", 3, 1)])
def test_the_cpu_waits_for_no_device_in_a_minibatch(name, n, m, monkeypatch):
    assert not once(name, n, m).record.waits
    # A caller who reads every loss waits between two minibatches, and delays nothing.
    run = Run(name, n, m, use=lambda result: result.loss.item())
    assert [(step, where) for step, where, _ in run.record.waits] == [
        (None, "the caller")
    ] * MINIBATCHES
    assert all(works for *_, works in run.record.waits)
    assert all(differing(run, seed) == (Counter(), 0) for seed in range(5))
    # It does before it writes pinned memory again: for the copy from there, windows ago.
    monkeypatch.setattr("spectrain_ext.transport.local.PAGEABLE_COPY_LIMIT", 16)
    of_batches = property(lambda edge: not edge._from_stage, lambda edge, value: None)
    monkeypatch.setattr(Edge, "_stages", of_batches, raising=False)
    run = Run(name, n, m)
    assert {(step[1], where) for step, where, _ in run.record.waits} == {(PULL, "_staged")}
    for step, _, works in run.record.waits:
        for copy in works:
            assert copy.step is None or (copy.step[1] is PULL and copy.step[2] < step[2])
    assert all(differing(run, seed) == (Counter(), 0) for seed in range(5))


@pytest.mark.parametrize("fault", ["needless", "missing"])
def test_a_fault_is_noticed(fault, monkeypatch):
    send = Edge.send

    def faulty(edge, message, source, *ready, header=NO_HEADER):
        if fault == "missing":
            return send(edge, message, source, header=header)
        read = send(edge, message, source, *ready, header=header)
        edge._receiver.wait(read)
        return read

    monkeypatch.setattr(Edge, "send", faulty)
    run = Run("auto", 3, 3)
    with pytest.raises(AssertionError, match=fault):
        compare(run)
    assert differing(run, 0)[0]


def test_the_picture_in_the_documents_is_of_this_pipeline(tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path / "overlap.svg")

    def written(path):
        return re.findall(r">([^<>]+)</text>", path.read_text())

    documents = Path(__file__).resolve().parents[2] / "docs"
    drawn = written(tmp_path / "overlap.svg")
    assert drawn == written(documents / "overlap.svg") and "U5" in drawn
