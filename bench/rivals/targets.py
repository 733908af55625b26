"""Targets of the operators, and whether a run reaches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from table import table

from .rows import Case, Row, cases, fastest, share

_LARGE = 2**24  # elements from which caches no longer decide
_GPU_LARGE = 2**26
_COMPOSED, _COMPILED, _LOOP = "fused + torch.add", "torch.compile", "per-tensor SpecTrain loop"
_SGD_2, _ADAMW_2 = "SGD step + 2 predictions", "AdamW step + 2 predictions"
_STAGE = "pipeline stage, one minibatch"
#: Operation, rival, how many times as fast.
_ON_CPU = [(_SGD_2, _COMPOSED, 1.6), (_SGD_2, _COMPILED, 1.05), (_STAGE, _COMPOSED, 1.15)]
_ON_GPU = [
    *((_SGD_2, _COMPOSED, 1.5), (_ADAMW_2, _COMPOSED, 1.9), (_STAGE, _COMPOSED, 1.15)),
    *((_SGD_2, _COMPILED, 1.0), (_ADAMW_2, _COMPILED, 1.0), (_SGD_2, _LOOP, 3.5)),
]


class Verdict(NamedTuple):
    """A target, and what was measured; `met` is None where nothing was."""

    what: str
    target: str
    measured: str
    met: bool | None


def judged(about: dict[str, Any], benchmarks: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Every target that can be checked on the device of a run."""
    found, on_cpu = cases(Row.all_of(benchmarks)), about["device"] == "cpu"
    fp32 = [case for case in found if case[0].precision == "fp32"]
    large = [case for case in fp32 if case[0].elements >= _LARGE]
    if on_cpu:
        made = [_faster(large, *each) for each in _ON_CPU]
        made += [_share(large, name, 0.95) for name in ("predict_", "predict")]
    else:
        small = [c for c in fp32 if c[0].tensors == 300 and c[0].elements < 2**21]
        largest = [case for case in found if case[0].elements >= _GPU_LARGE]
        made = [_share(largest, None, 0.97), *(_faster(large, *each) for each in _ON_GPU)]
        made.append(_faster(small, _SGD_2, _LOOP, 20.0))
    return [*made, *(_host(*each) for each in host_us(benchmarks).items())]


def markdown(found: Iterable[Verdict]) -> str:
    met = {None: "not measured", True: "yes", False: "**no**"}
    rows = [[v.what, v.target, v.measured, met[v.met]] for v in found]
    return table("what|target|measured|reached", rows)


def host_us(benchmarks: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the host time of calls on empty tensors, of a run of bench_host.py."""
    chosen = [each for each in benchmarks if each["extra_info"].get("host")]
    return {each["extra_info"]["name"]: each["stats"]["median"] * 1e6 for each in chosen}


def _host(name: str, us: float) -> Verdict:
    limit = 25.0 if "refresh" in name else 5.0
    return Verdict(f"host time, {name}", f"<= {limit:.0f} us", f"{us:.2f} us", us <= limit)


def _faster(found: Sequence[Case], operation: str, other: str, factor: float) -> Verdict:
    """Of the faster of our implementations, against one rival."""

    def ratios(case: Case, mine: Row) -> Iterable[tuple[float, float]]:
        for theirs in case:
            if theirs.name == other:
                yield theirs.median_us / mine.median_us, theirs.best_us / mine.best_us

    what, target = f"{operation}, against {other}", f">= {factor:.2f}x"
    return _worst(what, target, found, operation, ratios, factor, "{:.2f}x")


def _share(found: Sequence[Case], operation: str | None, least: float) -> Verdict:
    """Of bytes a second: torch's copy of the same tensors moves 8 for the 12 of a prediction."""

    def shares(case: Case, mine: Row) -> Iterable[tuple[float, float]]:
        median, best = share(mine, case), share(mine, case, best=True)
        if median is not None and best is not None:
            yield median, best

    name = operation or "every operator at 2^26 elements and more"
    what = f"{name}, its share of the best copy's bandwidth beyond the cache"
    return _worst(what, f">= {least:.0%}", found, operation, shares, least, "{:.0%}")


def _worst(
    what: str,
    target: str,
    found: Sequence[Case],
    operation: str | None,
    figures: Callable[[Case, Row], Iterable[tuple[float, float]]],
    least: float,
    text: str,
) -> Verdict:
    """The worst workload decides, by medians; best times are said beside."""
    of = [
        (*figure, mine.workload if operation else f"{mine.operation}, {mine.workload}")
        for case in found
        if operation in (None, case[0].operation) and (mine := fastest(case, "ours"))
        for figure in figures(case, mine)
    ]
    if not of:
        return Verdict(what, target, "", None)
    median, best, where = min(of)
    measured = f"{text.format(median)} at worst ({where}); {text.format(best)} by best times"
    return Verdict(what, target, measured, median >= least)
