"""What a comparison is judged by: accuracy for classes, perplexity for text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .results import MethodResult


@dataclass(frozen=True)
class Metric:
    """A figure of a method's result.

    Attributes:
        heading: for a table's column.
        unit: behind a value in running text, "" for none.
        digits: after the point.
        mean: over the seeds, in the unit of the heading.
        deviation: the standard deviation, likewise.
        higher_is_better: which way.
        loss_unit: the unit of losses.
    """

    heading: str
    unit: str
    digits: int
    mean: Callable[[MethodResult], float]
    deviation: Callable[[MethodResult], float]
    higher_is_better: bool
    loss_unit: str

    def text(self, result: MethodResult) -> str:
        """Mean, and deviation where there are several seeds; or how many of them diverged."""
        return value_text(result, self.mean(result), self.deviation(result), self.digits)

    def best(self, results: Sequence[MethodResult]) -> float | None:
        """The best mean of several methods; the reference, which overlaps nothing, is no rival."""
        means = [self.mean(result) for result in results if result.method != "sync"]
        finite = [mean for mean in means if math.isfinite(mean)]
        if len(means) < 2 or not finite:
            return None
        return max(finite) if self.higher_is_better else min(finite)


def value_text(result: MethodResult, mean: float, deviation: float, digits: int) -> str:
    """``mean ± deviation``; or, for a mean that is not finite, how many seeds diverged."""
    several = len(result.runs) > 1
    if not math.isfinite(mean):
        diverged = sum(not math.isfinite(run.test_loss) for run in result.runs)
        return f"{diverged} of {len(result.runs)} diverged" if several else "diverged"
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if several else "")


ACCURACY = Metric(
    heading="test\naccuracy %",
    unit=" %",
    digits=1,
    mean=lambda result: 100 * result.test_accuracy,
    deviation=lambda result: 100 * result.test_accuracy_std,
    higher_is_better=True,
    loss_unit="nats",
)
PERPLEXITY = Metric(
    heading="test\nperplexity",
    unit=" perplexity",
    digits=2,
    mean=lambda result: result.perplexity,
    deviation=lambda result: result.perplexity_std,
    higher_is_better=False,
    loss_unit="nats per character",
)
