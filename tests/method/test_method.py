"""Tests the registered methods, their formulas, and the errors of invalid methods."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest
import torch
from oracle.methods import METHODS, window_of
from oracle.schedules import CHUNKED

from spectrain_ext.method import (
    Method,
    MethodName,
    Phase,
    check,
    delay_under,
    factor_of,
    find_method,
    hybrid,
    in_words,
    interleaved,
    methods,
    microbatches_of,
    phases_of,
    phases_on,
    places_of,
    recipe_clip,
    rules_at,
    second_order,
    spectrain,
)
from spectrain_ext.optim import SGD, SOAP, AdamW, Muon
from spectrain_ext.schedule import (
    GENERATORS,
    Place,
    Replicas,
    Rules,
    ScheduleName,
    count_stage,
    takes_window,
)


def test_editors_know_all_names():
    literals = [get_args(each) for each in get_args(MethodName)]
    assert sorted(itertools.chain(*literals)) == sorted(methods())
    assert get_args(ScheduleName) == tuple(GENERATORS)


def test_a_method_shows_what_differs_from_the_defaults():
    own = Method("own", "mine", law="difference", forward_horizon=delay_under, families=("sgd",))
    shown = "law='difference', forward_horizon=delay_under, families=('sgd',)"
    assert repr(own) == f"Method(name='own', summary='mine', {shown})"
    assert " at 0x" not in repr(hybrid("pipedream", spectrain()))


def test_names():
    assert methods()[:5] == ("auto", "sync", "gpipe", "1f1b", "vanilla")
    for name in methods():
        method = find_method(name)
        assert method.name == name
        assert method.summary
        assert find_method(method) is method


def test_hybrids():
    made = hybrid("pipedream", "sync", after=8)
    assert (made.name, made.summary) == ("pipedream+sync@8", "pipedream, then sync")
    assert find_method("pipedream+sync@8") == made
    assert [phase.schedule for phase in phases_of(made)] == ["1f1b-async", "gpipe"]
    three = hybrid("sync", made, after=2)
    assert three.name == "sync+pipedream+sync@8@2"
    assert [phase.backward for phase in phases_of(three)] == ["current", "stash", "current"]
    assert microbatches_of(hybrid("pipedream", "1f1b"), 4) == 4
    assert hybrid().then == Phase(find_method("sync"), 1000)
    # rates count from the beginning of their phase
    paced = phases_on(hybrid("sync", "pipemare-t1", after=100), 3, 1)
    first, then = [factor_of(phase, places[0]) for phase, places in paced]
    assert first is None
    assert [then(t) for t in (0, 500, 1000)] == pytest.approx([1 / 2, 1 / 2**0.5, 1])


NO_PHASE = dataclasses.replace(find_method("sync"), then=find_method("sync"))


@pytest.mark.parametrize(
    ("make", "error", "expected"),
    [
        (lambda: hybrid(after=None), TypeError, "after: expected an int, got NoneType"),
        (lambda: hybrid(after=-1), ValueError, "after: expected at least 0, got -1"),
        (lambda: hybrid(after=2.5), TypeError, "after: expected an int, got float"),
        (lambda: hybrid(after=True), TypeError, "after: expected an int, got bool"),
        (lambda: hybrid("nope"), ValueError, "there is no 'nope'"),
        (lambda: hybrid(hybrid()), ValueError, "'pipedream.sync@1000' already changes, to 'sync'"),
        (lambda: find_method("pipedream+nope@3"), ValueError, "there is no 'nope'"),
        (lambda: find_method("pipedream+sync"), ValueError, "there is no 'pipedream.sync'"),
        (lambda: phases_of(NO_PHASE), TypeError, "then of 'sync': expected a Phase .*got Method"),
        (lambda: check(hybrid(then="pipedream-2bw"), 4, microbatches=1), ValueError, "at least 4"),
        (lambda: check("vanilla+lwp-v@3", 2, optimizer=sgd()), ValueError, "under method 'lwp-v'"),
    ],
)
def test_what_a_hybrid_cannot_be(make, error, expected):
    with pytest.raises(error, match=expected):
        make()


@pytest.mark.parametrize("name", methods())
def test_windows_and_rules_are_the_definitions(name):
    """For every place where the oracle's definition makes sense."""
    method, definition = find_method(name), METHODS[name]
    for n, m, asked in itertools.product((1, 2, 3, 4, 7, 8), (1, 2, 3, 4, 8), range(5)):
        uneven = [n + 2 - (k + 1) // 2 for k in range(n)]
        window = (None, "classic", "wide", 3, uneven)[asked]
        if n > definition.stages or (window and not takes_window(method.schedule)):
            continue
        ws = [window_of(definition, window, k, n, m) for k in range(n)]
        if definition.reads == "previous" and not (m >= n and max(ws) <= m + 1):
            continue
        if definition.schedule in CHUNKED and (n % 2 or m % (n // 2)):
            continue
        places = places_of(method, n, m, window)
        assert [place.window for place in places] == ws
        if definition.roomy and window is None and m >= n:  # which makes nothing later
            delays = (delay_under(method.schedule, place) for place in places)
            assert max(delays) <= 1
        counted = definition.forward == "counted"
        latest = 0 if counted else definition.forward(0, n, ws[0], m)
        for k, (place, w) in enumerate(zip(places, ws, strict=True)):
            rules, at = rules_at(method, place), (k, n, w, m)
            assert rules.law == definition.law
            assert rules.forward_reads == definition.reads
            if counted:
                assert rules.forward_horizon == ("counted" if w > 1 else 0)
            else:
                assert rules.forward_horizon == definition.forward(*at)
            assert rules.lead == definition.lead(*at, latest)
            assert (rules.backward, rules.once) == (definition.backward, definition.once)
            assert rules.backward_horizon == definition.backward_horizon(*at)
            factor = factor_of(method, place) or (lambda update: 1)
            for update in (0, 500, 2000):
                assert factor(update) == pytest.approx(definition.rates(*at, update))


def test_vanilla_has_the_version_difference_of_timeprest() -> None:
    """Its formula, with W workers and N microbatches: floor((W + N - 2) / N)."""
    vanilla = find_method("vanilla")
    for w, n in itertools.product(range(1, 20), range(1, 20)):
        late = [delay_under(vanilla.schedule, place) for place in places_of(vanilla, w, n)]
        assert max(late) == (w + n - 2) // n


@pytest.mark.parametrize("name", methods())
def test_registered_methods_pass_the_checks_that_own_ones_have(name):
    """They are not checked where they are used."""
    method = find_method(name)
    for n, m in itertools.product((1, 2, 3, 4, 6, 9), (1, 2, 3, 4, 6, 9)):
        if n > (method.max_stages or n) or (method.min_microbatches and m < n):
            continue
        places = places_of(method, n, m)
        own = dataclasses.replace(method, name="own")
        assert places_of(own, n, m) == places
        assert [rules_at(own, place) for place in places] == [
            rules_at(method, place) for place in places
        ]


@pytest.mark.parametrize(
    ("name", "n", "m", "expected"),
    [
        (
            *("auto", 8, 8),
            "auto: 8 microbatches a minibatch, so that forwards are at most 1 update late; every "
            "stage predicts 1 update ahead by the second-order law; backwards meet their forwards' "
            "weights",
        ),
        ("spectrain", 8, 1, "; every stage predicts 3 to 7 updates ahead by the linear law; b"),
        ("spectrain-local", 4, 1, "is predicted by what it is late; backwards meet the newest"),
        ("vanilla", 4, 1, "vanilla: 1 microbatch a minibatch, so that forwards are at most 3 upd"),
        ("auto", 4, 1, "learning rates begin with 0.577 of their own"),
        ("auto", 4, 1, "every stage predicts 2 to 3 updates ahead"),
        ("sync", 4, 1, "nothing is late and nothing predicted"),
        ("auto", 1, 1, "nothing is late and nothing predicted"),
    ],
)
def test_in_words(name: str, n: int, m: int, expected: str) -> None:
    assert expected in in_words(find_method(name), places_of(find_method(name), n, m))


def test_soap_is_recommended_instead_of_adamw_where_updates_are_late() -> None:
    method, weights = find_method("auto"), [torch.zeros(1, requires_grad=True)]
    for make, m, hint in ((AdamW, 1, True), (AdamW, 4, False), (SGD, 1, False)):
        line = in_words(method, places_of(method, 4, m), make(weights, 0.1))
        assert line.endswith("SOAP loses far less than AdamW") == hint


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *((name, [2, 2, 2, 2]) for name in ("second-order", "zb-h1-async", "interleaved-async")),
        *((name, [4, 2, 1, 1]) for name in ("second-order", "auto", "zb-h1-async")),
    ],
)
def test_replicas_are_predicted_as_far_as_others(name: str, counts: list[int]) -> None:
    """Without momentum as well: as far as stage 0 is late; auto less half of a stage's delay."""
    method, half = find_method(name), name in ("auto", "zb-h1-async")
    places = places_of(method, 4, 8, replicas=Replicas(counts))
    delays = [
        max(count_stage(method.schedule, places[0], place, Rules(), False).delays)
        for place in places
    ]
    for place, own in zip(places, delays, strict=True):
        for optimizer in (SGD, torch.optim.SGD):  # by the momentum and by the difference
            rules = rules_at(method, place, optimizer([torch.ones(1)], 0.1, 0.9))
            assert rules.forward_horizon + rules.lead == delays[0] - half * (own // 2)


def test_no_stage_leads_where_stage_0_is_not_late() -> None:
    flushing = dataclasses.replace(second_order(), name="own", schedule="1f1b")
    assert [rules_at(flushing, place).lead for place in places_of(flushing, 4, 4)] == [0] * 4


def test_settings_of_methods():
    rules = rules_at(second_order(), Place(2, 4, 2, latest=3))
    assert (rules.forward_horizon, rules.lead, rules.backward) == (1, 2, "stash")
    other = second_order(lead=lambda place: 1, backward="predict", clip=recipe_clip)
    rules = rules_at(other, Place(2, 4, 2))
    assert (rules.forward_horizon, rules.lead, rules.backward_horizon) == (1, 1, 1)
    assert other.clip(Place(2, 4, 2)) == pytest.approx(0.285)
    assert spectrain() == find_method("spectrain")
    other = spectrain(law="difference")
    assert other == dataclasses.replace(spectrain(), law="difference")
    rules = rules_at(other, Place(2, 4, 2))
    assert (rules.forward_horizon, rules.backward_horizon, rules.keeps_before) == (2, 1, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        other.name = "other"


def test_interleaved_with_other_numbers_of_chunks():
    assert find_method("interleaved").chunks == find_method("wpipe").chunks == 2
    for flushes in (True, False):
        four = interleaved(chunks=4, flushes=flushes)
        assert four.chunks == four.schedule.chunks == 4
        found = [place.window for place in places_of(four, 8, 8)]
        assert found == [four.schedule.window(k, 8, 8) for k in range(8)]
        with pytest.raises(ValueError, match="there is no window to choose"):
            places_of(four, 8, 1, 3)
    # on two devices the first stages are delayed by one update, and all predict one ahead
    late = [rules_at(four, place) for place in places_of(four, 8, 8)]
    delays = [delay_under(four.schedule, place) for place in places_of(four, 8, 8)]
    assert delays == [1, 1, 1, 1, 0, 0, 0, 0]
    assert [(rule.forward_horizon, rule.lead) for rule in late] == [
        (delay, 1 - delay) for delay in delays
    ]


def test_unknown_methods():
    with pytest.raises(ValueError, match=r"no 'zero'; there are auto, sync, gpipe, 1f1b, vanilla"):
        find_method("zero")
    for typo, meant in (
        ("spectrian", "'spectrain' or 'spectrain-stash' or 'spectrain-local'"),
        ("PipeMare", "'pipemare' or 'pipemare-t2' or 'pipemare-t1'"),
        ("1F1B", "'1f1b'"),
    ):
        with pytest.raises(ValueError) as caught:
            find_method(typo)
        assert str(caught.value) == f"method: there is no {typo!r}; did you mean {meant}?"
    with pytest.raises(TypeError, match="expected a name or a Method, got int"):
        find_method(3)


def in_line(place: Place) -> int:
    return place.stage


_OLDER = {"forward_reads": "entry"}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"window": lambda k, n, m: 2 - k}, "window of 'own' gives 0 for stage 2 of 3.*at least 1"),
        ({"window": lambda k, n, m: 1.5}, "window of 'own' gives 1.5 for stage 0.*an int"),
        ({"window": lambda k, n, m: k + 1}, "stage 1 of 3 would wait for 2 .*a deadlock"),
        ({"schedule": "none"}, "schedule of 'own': .*no 'none'; there are 1f1b-async"),
        ({"schedule": "1f1b-asink"}, "schedule of 'own': .*did you mean '1f1b-async'"),
        ({"forward_horizon": lambda p: -p.stage}, "forward_horizon of 'own' gives -1 for stage 1"),
        ({"forward_horizon": 3}, "forward_horizon of 'own': expected a function of a Place, got 3"),
        ({"forward_horizon": "local"}, "expected a function of a Place, got 'local'"),
        ({"lead": lambda p: -1}, "lead of 'own' gives -1 for stage 0"),
        ({"lead": lambda p: 1}, "lead of 'own' at stage 0 of 3: only the second-order law"),
        ({"backward_horizon": lambda p: -2}, "backward_horizon of 'own' gives -2 for stage 0"),
        ({"backward_horizon": in_line}, "backward_horizon .* stage 1 .*backward='current' predict"),
        ({"backward": "stash", "backward_horizon": in_line}, "stage 1 of 3: backward='stash' pred"),
        ({"law": "cubic"}, "law of 'own': expected one of linear, geometric.*got 'cubic'"),
        ({"backward": "reload"}, "backward of 'own': expected one of current, predict, stash"),
        ({"forward_reads": "oldest"}, "forward_reads of 'own': expected one of newest, entry"),
        ({"families": ("sgd", "lion")}, "families of 'own': expected one of .*got 'lion'"),
        ({**_OLDER, "forward_horizon": in_line}, "1 of 3: .*'entry' reads an .*law='difference'"),
        ({**_OLDER, "law": "difference", "forward_horizon": "counted"}, "'entry' reads an older"),
        ({**_OLDER, "once": True}, "once of 'own' at stage 0"),
        ({"forward_reads": "previous"}, "window of 'own' at stage 0 .*at most microbatches . 1"),
        ({"law": "second-order", "forward_horizon": "counted"}, "the step writes a second-order"),
        ({"max_stages": 2}, "'own' is defined for at most 2 stages, got 3"),
        ({"min_microbatches": lambda p: 2}, "'own' needs at least 2 microbatches for 3 stages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_inconsistent_methods(changed: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        check(Method("own", "not one of ours", **changed), 3, microbatches=1)


def sgd(**more):
    return SGD([torch.zeros(1)], lr=0.1, **more)


def torchs(kind):
    return kind([torch.zeros(1, 1)], lr=0.1)


OF_ADAM = dataclasses.replace(find_method("vanilla"), name="own", families=("adam",))


@pytest.mark.parametrize(
    ("name", "stages", "more", "match"),
    [
        ("spectrain", 4, {}, None),
        ("spectrain", 4, {"optimizer": sgd(momentum=0.9)}, None),
        ("spectrain", 4, {"optimizer": sgd()}, r"stages\[0\] under method 'spectrain': .*momentum"),
        ("vanilla", 4, {"optimizer": sgd()}, None),
        ("lwp-w", 4, {"optimizer": sgd()}, None),
        ("spectrain-smoothed", 2, {"optimizer": AdamW([torch.zeros(1)])}, "AdamW.*defined for sgd"),
        ("spectrain-smoothed", 2, {"optimizer": sgd(momentum=0.9)}, "no smoothed momentum"),
        ("lwp-w", 4, {"optimizer": torchs(torch.optim.Adafactor)}, None),
        ("pipedream", 4, {"optimizer": torchs(torch.optim.SGD)}, None),
        ("spectrain", 1, {"optimizer": torchs(torch.optim.RMSprop)}, None),
        (spectrain(law="difference"), 4, {"optimizer": torchs(torch.optim.NAdam)}, None),
        ("spectrain", 4, {"optimizer": torchs(torch.optim.NAdam)}, r"optim\.NAdam, or a method"),
        ("lwp-v", 4, {"optimizer": torchs(torch.optim.RMSprop)}, "use a method that needs none"),
        (OF_ADAM, 4, {"optimizer": torchs(torch.optim.Adam)}, None),
        (OF_ADAM, 4, {"optimizer": torchs(torch.optim.RMSprop)}, "RMSprop, .* is defined for adam"),
        ("spectrain-smoothed", 2, {"optimizer": torchs(torch.optim.RMSprop)}, "is defined for sgd"),
        ("xgrad", 2, {}, "at most 1 stage, got 2"),
        *(
            (name, 2, {"optimizer": make([torch.zeros(2, 2)])}, f"and method '{name}' is defined")
            for make in (Muon, SOAP)
            for name in ("sc", "braking", "dc-asgd", "gap-aware")
        ),
        ("spectrain", 2, {"optimizer": torchs(torch.optim.Muon)}, r"use spectrain_ext.optim.Muon"),
        ("pipedream-2bw", 4, {"microbatches": 3}, "at least 4 microbatches"),
        ("pipedream-2bw", 4, {"microbatches": 4, "window": "wide"}, r"at most microbatches \+ 1"),
        *(
            (name, 1, {"window": "classic"}, f"method '{name}' finishes every minibatch before")
            for name in ("sync", "gpipe", "1f1b", "zb-h1", "xgrad")
        ),
        ("vanilla", 3, {"window": [1, 2, 1]}, "stage 1 of 3 would wait for 2 .*a deadlock"),
        ("vanilla", 3, {"window": [2, 1, 2]}, "stage 2 of 3 would wait for 2 .*a deadlock"),
        ("vanilla", 2, {"microbatches": 4, "replicas": (1, 2), "window": [3, 2]}, None),
        ("vanilla", 2, {"microbatches": 4, "replicas": (1, 2), "window": [4, 3]}, "each of its 2 "),
        ("vanilla", 3, {"window": 0}, "window: expected at least 1 for stage 0 of 3, got 0"),
        ("vanilla", 3, {"window": [2, 1, 0]}, "at least 1 for stage 2 of 3, got 0"),
        ("vanilla", 3, {"window": [2, 1]}, r"window: expected one per stage \(3\), got 2"),
        ("vanilla", 3, {"window": "huge"}, "expected 'classic', 'wide' or numbers, got 'huge'"),
        ("vanilla", 3, {"window": 1.5}, "window: expected an int for stage 0, got float"),
        ("vanilla", 3, {"window": [2, True, 1]}, "expected an int for stage 1, got bool"),
        ("vanilla", 2, {"microbatches": 2, "replicas": (2, 1)}, None),
        ("vanilla", 2, {"microbatches": 3, "replicas": (2, 1)}, "must divide the 3"),
        ("vanilla", 3, {"microbatches": 2, "replicas": (2, 1)}, r"per stage \(3\), got \[2, 1\]"),
        *(  # with [1, 2, 1] the ranks of interleaved wait for each other in a cycle
            (name, 4, {"microbatches": 8, "replicas": [n, 2, n, n]}, match)
            for name in ("interleaved", "interleaved-async", "wpipe")
            for n, match in ((1, "as many replicas of ev"), (2, None))
        ),
    ],
)
def test_whether_a_method_can_run_is_known_without_a_pipeline(name, stages, more, match):
    if match is None:
        check(name, stages, **more)
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            check(name, stages, **more)
