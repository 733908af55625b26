"""Defines the metrics that comparisons rank methods by, and their text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .looks import REFERENCE
from .results import MethodResult


@dataclass(frozen=True)
class Metric:
    """A metric of a comparison.

    Attributes:
        figure: its name in ``Run``.
        scale: factor from the figure to the displayed unit.
        heading: heading of the table column.
        unit: unit after a value in running text, "" for none.
        digits: digits after the decimal point.
        higher_is_better: whether higher values are better.
        loss_unit: unit of the losses.
    """

    figure: str
    scale: int
    heading: str
    unit: str
    digits: int
    higher_is_better: bool
    loss_unit: str

    def mean(self, result: MethodResult) -> float:
        """Return the mean over seeds in the unit of the heading."""
        return self.scale * result.mean(self.figure)

    def text(self, result: MethodResult) -> str:
        """Return mean and, with several seeds, deviation, or the number of diverged seeds."""
        return in_words(result, self.figure, self.digits, self.scale)

    def best(self, results: Sequence[MethodResult]) -> float | None:
        """Return the best mean of the methods, without the reference, which does not overlap."""
        means = [self.mean(result) for result in results if result.method != REFERENCE]
        finite = [mean for mean in means if math.isfinite(mean)]
        if len(means) < 2 or not finite:
            return None
        return max(finite) if self.higher_is_better else min(finite)


def in_words(result: MethodResult, figure: str, digits: int, scale: int = 1) -> str:
    """Return ``mean ± deviation``, or the number of diverged seeds if the mean is not finite."""
    several = len(result.runs) > 1
    mean = scale * result.mean(figure)
    if not math.isfinite(mean):
        diverged = sum(not math.isfinite(run.test_loss) for run in result.runs)
        return f"{diverged} of {len(result.runs)} diverged" if several else "diverged"
    deviation = f" ± {scale * result.deviation(figure):.{digits}f}" if several else ""
    return f"{mean:.{digits}f}{deviation}"


ACCURACY = Metric(
    figure="test_accuracy",
    scale=100,
    heading="test\naccuracy %",
    unit=" %",
    digits=1,
    higher_is_better=True,
    loss_unit="nats",
)
PERPLEXITY = Metric(
    figure="perplexity",
    scale=1,
    heading="test\nperplexity",
    unit=" perplexity",
    digits=2,
    higher_is_better=False,
    loss_unit="nats per character",
)
LOSS = Metric(
    figure="test_loss",
    scale=1,
    heading="mean\ntest loss",
    unit="",
    digits=3,
    higher_is_better=False,
    loss_unit="of the workload",
)
#: Metrics by the name that a workload gives in ``judged``.
METRICS = {"accuracy": ACCURACY, "perplexity": PERPLEXITY, "loss": LOSS}
