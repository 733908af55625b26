"""The figures this package wants to reach, held against what a run measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .operations import ADAMW_1, ADAMW_2, OURS
from .report import Report, Row, table
from .workloads import MIXED, Workload

_LARGE = 2**24  # elements from which caches no longer decide
_GPU_LARGE = 2**26
_COMPOSED = "fused + torch.add"


@dataclass(frozen=True)
class Verdict:
    """A target, and what was measured; `met` is None where nothing was."""

    what: str
    target: str
    measured: str
    met: bool | None


def verdicts(report: Report) -> list[Verdict]:
    """Every target that can be checked on the device of the run."""
    on_cpu = report.environment.get("device") == "cpu"
    here = _on_cpu(report) if on_cpu else _on_gpu(report)
    return [*here, *counted(), *_host(report)]


def markdown(found: Iterable[Verdict]) -> str:
    met = {None: "not measured", True: "yes", False: "**no**"}
    rows = [[v.what, v.target, v.measured, met[v.met]] for v in found]
    return table("what|to be reached|measured|reached", rows)


def _on_cpu(report: Report) -> list[Verdict]:
    two, stage = "SGD step + 2 predictions", "pipeline stage, one minibatch"
    return [
        _faster(report, two, _COMPOSED, 1.6),
        _faster(report, two, "torch.compile", 1.05),
        _share_of_copy(report, "predict_", 0.95),
        _share_of_copy(report, "predict", 0.95),
        _faster(report, stage, _COMPOSED, 1.15),
    ]


def _on_gpu(report: Report) -> list[Verdict]:
    sgd, adam = "SGD step + 2 predictions", "AdamW step + 2 predictions"
    loop = "per-tensor SpecTrain loop"
    large = [r for r in report.rows if r.implementation == "Plan" and r.elements >= _GPU_LARGE]
    shares = [(row.share, row.operation) for row in large if row.share is not None]
    worst, name = min(shares, default=(0.0, ""))
    return [
        Verdict(
            "every operator at 2^26 elements and more, share of the copy",
            ">= 97 %",
            f"{worst:.1%} at worst ({name})" if shares else "",
            worst >= 0.97 if shares else None,
        ),
        _faster(report, sgd, _COMPOSED, 1.5),
        _faster(report, adam, _COMPOSED, 1.9),
        _faster(report, sgd, "torch.compile", 1.0),
        _faster(report, adam, "torch.compile", 1.0),
        _faster(report, sgd, loop, 3.5),
        _faster(report, sgd, loop, 20.0, lambda r: r.tensors == 300 and r.elements < 2**21),
        _faster(report, "pipeline stage, one minibatch", _COMPOSED, 1.15),
    ]


def counted() -> list[Verdict]:
    """The extra bytes of predictions in a mixed-precision AdamW step, from the operations' lists.

    The step alone writes the bfloat16 working weights; they may as well be predicted ones.
    """
    work = Workload("one", ((1,),), MIXED)
    step, more = (op.bytes_per_element(work) for op in (ADAMW_1, ADAMW_2))
    more -= step
    copied = more + 2 * MIXED.outs.itemsize
    cases = (more, 0.08, "one more output"), (copied, 0.22, "the copy that a pipeline needs")
    return [
        Verdict(
            f"extra bytes of prediction in a mixed-precision AdamW step of {step}, with {what}",
            f"<= {limit:.0%}",
            f"{extra / step:.1%} (counted)",
            extra / step <= limit,
        )
        for extra, limit, what in cases
    ]


def _host(report: Report) -> list[Verdict]:
    limits = {name: 25.0 if "refresh" in name else 5.0 for name in report.host_us}
    return [
        Verdict(
            f"host time, {name}", f"<= {limits[name]:.0f} us", f"{us:.2f} us", us <= limits[name]
        )
        for name, us in report.host_us.items()
    ]


def _is_large(row: Row) -> bool:
    return row.elements >= _LARGE


def _fastest(
    report: Report, operation: str, which: Callable[[Row], bool]
) -> list[tuple[Row, list[Row]]]:
    """Our fastest row (by median) of every case of an operation, and all rows of the case."""
    found = []
    for (name, _, precision), rows in report.cases().items():
        chosen = [r for r in rows if r.implementation in OURS and which(r)]
        if name == operation and precision == "fp32" and chosen:
            found.append((min(chosen, key=lambda r: r.median_us), rows))
    return found


def _faster(
    report: Report,
    operation: str,
    other: str,
    factor: float,
    which: Callable[[Row], bool] = _is_large,
) -> Verdict:
    ratios = [
        (theirs.median_us / mine.median_us, theirs.best_us / mine.best_us, mine.workload)
        for mine, rows in _fastest(report, operation, which)
        for theirs in rows
        if theirs.implementation == other
    ]
    return _verdict(
        f"{operation}, against {other}", f">= {factor:.2f}x", ratios, factor, "{:.2f}x".format
    )


def _share_of_copy(report: Report, operation: str, least: float) -> Verdict:
    """Of bytes a second: torch's copy of the same tensors moves 8 for the 12 of a prediction."""
    shares = [
        (mine.share, mine.share if mine.share_best is None else mine.share_best, mine.workload)
        for mine, _ in _fastest(report, operation, _is_large)
        if mine.share is not None
    ]
    return _verdict(
        f"{operation}, its share of the best copy's bandwidth beyond the cache",
        f">= {least:.0%}",
        shares,
        least,
        "{:.0%}".format,
    )


def _verdict(
    what: str,
    target: str,
    figures: list[tuple[float, float, str]],
    least: float,
    text: Callable[[float], str],
) -> Verdict:
    """The worst workload decides, by medians; best times are said beside."""
    if not figures:
        return Verdict(what, target, "", None)
    median, best, where = min(figures)
    measured = f"{text(median)} at worst ({where}); {text(best)} by best times"
    return Verdict(what, target, measured, median >= least)
