"""Tests the cut against brute force, and its report."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.partitioning import BlockProfile, Profile, Tie, cut

blocks = some.builds(
    BlockProfile,
    seconds=some.integers(0, 20).map(float),
    output_bytes=some.integers(0, 10),
    parameter_bytes=some.integers(0, 10),
    saved_bytes=some.integers(0, 10),
)


@some.composite
def cases(draw):
    found = draw(some.lists(blocks, min_size=1, max_size=8))
    pairs = some.tuples(*[some.integers(0, len(found) - 1)] * 2).filter(lambda p: p[0] < p[1])
    pairs = draw(some.lists(pairs, max_size=2)) if len(found) > 1 else []
    ties = tuple(Tie(a, b, f"{a} and {b}") for a, b in pairs)
    n = draw(some.integers(1, len(found)))

    def one_or(value, count):
        return draw(some.none() | value | some.lists(value, min_size=count, max_size=count))

    return (
        Profile(tuple(found), ties=ties),
        n,
        one_or(some.sampled_from([1.0, 4.0]), n - 1),
        one_or(some.integers(1, 120), n),
        draw(some.none() | some.lists(some.sampled_from([0.5, 1, 4]), min_size=n, max_size=n)),
    )


def brute_force(profile, n, bandwidth, limit, speeds):
    """Return the least bottleneck of all valid divisions, None if there is none."""
    best = None
    limits = limit if isinstance(limit, list) else [limit] * n
    bandwidths = bandwidth if isinstance(bandwidth, list) else [bandwidth] * (n - 1)
    count = len(profile.blocks)
    for inner in combinations(range(1, count), n - 1):
        if any(tie.first < end <= tie.last for tie in profile.ties for end in inner):
            continue
        places = [0, *inner, count]
        times = []
        for k in range(n):
            stage = profile.blocks[places[k] : places[k + 1]]
            seconds = sum(block.seconds for block in stage) / (speeds[k] if speeds else 1)
            memory = 4 * sum(b.parameter_bytes for b in stage)
            memory += (n - k) * sum(b.saved_bytes for b in stage)
            if limits[k] is not None and memory > limits[k]:
                break
            for boundary, edge in ((k - 1, places[k]), (k, places[k + 1])):
                if 0 < edge < count and bandwidths[boundary] is not None:
                    seconds += 2 * profile.blocks[edge - 1].output_bytes / bandwidths[boundary]
            times.append(seconds)
        else:
            uneven = sum(t**2 for t in times)
            if best is None or (max(times), uneven) < best:
                best = (max(times), uneven)
    return best


@given(cases())
def test_it_is_the_best_division(case):
    profile, n, bandwidth, limit, speeds = case
    expected = brute_force(*case)

    def run():
        more = {"bandwidth": bandwidth, "memory_limit": limit, "speeds": speeds}
        return cut(profile, n, **more)

    if expected is None:
        with pytest.raises(ValueError, match=r"^(memory_limit|n_stages): "):
            run()
        return
    found = run()
    times = [stage.seconds for stage in found.stages]
    assert (max(times), sum(t**2 for t in times)) == pytest.approx(expected)
    assert found == run()
    assert [stage.blocks.stop for stage in found.stages] == list(found.ends)
    assert all(len(stage.blocks) for stage in found.stages)
    limits = limit if isinstance(limit, list) else [limit] * n
    for stage, most in zip(found.stages, limits, strict=True):
        assert most is None or stage.memory_bytes <= most
    assert [stage.speed for stage in found.stages] == (speeds or [1] * n)


def profile_of(*seconds, **more):
    return Profile(tuple(BlockProfile(s, **more) for s in seconds))


def test_the_report_and_a_slower_device():
    names = ("embed", "blocks.0", "blocks.1", "head")
    blocks = tuple(BlockProfile(0.001, output_bytes=1000, name=name) for name in names)
    found = cut(Profile(blocks), 2, speeds=(2, 1), bandwidth=1e7)
    assert (found.ends, found.bottleneck, found.balance) == ((3, 4), 0, pytest.approx(29 / 34))
    assert str(found).splitlines() == [
        "stage    blocks        ms  transfer       MiB     speed  modules",
        "    0      0..2     1.500     0.200       0.0         2  embed to blocks.1",
        "    1      3..3     1.000     0.200       0.0         1  head",
        "slowest: stage 0; balance 85 %",
    ]
    alike = profile_of(3, 1, 4, 1, 5, 9, 2, output_bytes=7)
    assert str(cut(alike, 3)).splitlines()[0] == "stage    blocks        ms  transfer       MiB"
    assert cut(alike, 3, speeds=(1, 1, 1), bandwidth=[5.0] * 2) == cut(alike, 3, bandwidth=5.0)
    # two replicas of half the speed are as good as one device
    assert cut(alike, 3, speeds=(1, 0.5, 1), replicas=(1, 2, 1)).ends == cut(alike, 3).ends


def test_of_equally_slow_divisions_the_most_even_one():
    """Of two that are equally even, that with the earliest ends."""
    assert cut(profile_of(10, 1, 1, 4, 1, 1), 3).ends == (1, 3, 6)
    assert cut(profile_of(1, 1, 4, 1, 1, 10), 3).ends == (2, 5, 6)


def test_no_memory_that_is_enough():
    profile = profile_of(1, 1, 1, 1, saved_bytes=10)
    # the first stage keeps two microbatches, the last one only one
    assert cut(profile, 2, memory_limit=30).ends == (1, 4)
    with pytest.raises(ValueError, match=r"memory_limit: .*ends \[1, 4\].* 103 % of its limit"):
        cut(profile, 2, memory_limit=29)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"n_stages": 3}, r"n_stages: expected 1 to 2 \(the blocks\), got 3"),
        ({"n_stages": 0}, "n_stages: expected 1 to 2"),
        ({"bandwidth": 0.0}, "bandwidth: expected a number from 1e-18 to"),
        ({"bandwidth": [1, 1]}, r"bandwidth: expected one per boundary of stages \(1\), got 2"),
        ({"speeds": [1]}, r"speeds: expected one per stage \(2\), got 1"),
        ({"speeds": [1, 0]}, "speeds: expected a number from 1e-18 to .*, got 0"),
        ({"memory_limit": [1]}, r"memory_limit: expected one per stage \(2\), got 1"),
    ],
    ids=["many", "none", "bandwidth", "widths", "few", "still", "limits"],
)
def test_bad_arguments(changed, why):
    with pytest.raises(ValueError, match=why):
        cut(profile_of(1, 1), **{"n_stages": 2, **changed})


def test_bad_profiles():
    with pytest.raises(ValueError, match=r"^seconds: expected a number from 0 to 1e\+18, got -1"):
        BlockProfile(-1.0)
    for number in (float("nan"), float("inf"), 1e308, 10**400):
        with pytest.raises(ValueError, match=r"^saved_bytes: expected a number.* got "):
            BlockProfile(1.0, saved_bytes=number)
    with pytest.raises(TypeError, match=r"^output_bytes: expected a number, got True"):
        BlockProfile(1.0, True)
    cut(Profile((BlockProfile(1e18), BlockProfile(1e18))), 2)
    with pytest.raises(ValueError, match="profile: a tie between blocks 0 and 2 of 2"):
        cut(Profile((BlockProfile(1), BlockProfile(1)), ties=(Tie(0, 2, "x"),)), 2)
