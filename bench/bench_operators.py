"""Measures every operator against torch's alternatives and the fastest plain copy.

    pytest bench_operators.py                                    # in bench/; a minute or two
    pytest bench_operators.py -k "SGD-step and not 2-14" --suite models --precision mixed
    pytest bench_operators.py --device cuda --compile --benchmark-json=run.json
    pytest bench_operators.py --benchmark-compare=run.json --benchmark-compare-fail=median:15%

A test is an implementation of an operation on a list of tensors; pytest-benchmark's groups compare
those of one operation. conftest.py prints the summary as shares of the copy.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from rivals.contest import Settings, Times, TooLarge, contest, names
from rivals.operations import OPERATIONS, Operation, applies
from rivals.workloads import MODELS, PRECISIONS, Workload, even, model, synthetic

#: Numbers of tensors, and the exponents of two of their elements.
SUITES: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "quick": [((1,), (24,)), ((300,), (20,)), ((10,), (14,))],
    "sizes": [((1, 10, 300, 3000), (10, 14, 18, 22, 26, 28, 30))],
    "models": [],
    "small": [],
}
#: Numbers of tensors, and the elements of each: where a call, a plan or _foreach is fastest.
SMALL = ((1, 1024), (10, 1024), (100, 1024), (10, 2**20))


def workloads(options: Any) -> list[Workload]:
    """Return the workloads of a suite, with the options' values in place of its own."""
    found: list[Workload] = []
    for name in options.precision or ("fp32",):
        precision = PRECISIONS[name]
        sizes = SUITES[options.suite]
        if options.elements or options.tensors:
            sizes = [(tuple(options.tensors or (1,)), tuple(options.elements or (24,)))]
        for counts, exponents in sizes:
            found += synthetic(counts, exponents, precision)
        if options.suite == "models":
            found += [model(each, precision) for each in MODELS]
        if options.suite == "small":
            found += [even(count, elements, precision) for count, elements in SMALL]
    return found


def settings_of(config: pytest.Config) -> Settings:
    option = config.option
    once = getattr(getattr(config, "_benchmarksession", None), "disabled", True)
    return Settings(
        device=option.device,
        case_s=0.0 if once else option.case_seconds,
        compile=option.compile,
        memory_bytes=None if option.memory is None else int(option.memory * 2**30),
        least=1 if once else 5,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    settings = settings_of(metafunc.config)
    cases = [
        (operation, work, name)
        for work in workloads(metafunc.config.option)
        for operation in OPERATIONS
        if applies(operation, work)
        for name in names(operation, work, settings)
    ]
    ids = [
        re.sub(r"[^\w.+]+", "-", f"{op.name} {work.name} {work.precision.name} {name}").strip("-")
        for op, work, name in cases
    ]
    metafunc.parametrize(("operation", "work", "name"), cases, ids=ids)


@pytest.fixture(scope="module")
def contests() -> dict[Any, dict[str, Times]]:
    """Return the finished contests, by operation and workload."""
    return {}


def test_operator(
    benchmark: Any,
    contests: dict[Any, dict[str, Times]],
    operation: Operation,
    work: Workload,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    """The first test of a group measures the whole group; each test reports its own times."""
    key = operation, work
    if key not in contests:
        try:
            contests[key] = contest(operation, work, settings_of(request.config))
        except TooLarge as error:
            pytest.skip(str(error))
    hand_over(benchmark, contests[key][name])


def hand_over(benchmark: Any, times: Times) -> None:
    """Put times that were measured elsewhere into pytest-benchmark's statistics, tables and files.

    There is no public way; `_make_stats` is what its own `pedantic` calls after its rounds.
    """
    about = times.about
    benchmark.group = f"{about['operation']}, {about['workload']}, {about['precision']}"
    benchmark.extra_info.update(about)
    benchmark._mode = "in turn"
    if benchmark.enabled:
        stats = benchmark._make_stats(1)
        for seconds in times.seconds:
            stats.update(seconds)
