"""Results of training runs, their mean over seeds, and the JSON file that holds them."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import write_atomically

_LARGEST_LOSS = 700.0  # beyond, its exponential is no float64


@dataclass(frozen=True)
class Run:
    """One method trained with one seed.

    ``test_accuracy`` is the fraction of targets (classes or next characters) that were found, from
    0 to 1, ``test_loss`` the mean cross entropy in nats, ``losses`` the training loss of every
    minibatch in order, ``weight_version_bytes`` the pipeline's property of that name.
    """

    method: str
    seed: int
    test_accuracy: float
    test_loss: float
    minibatches_per_second: float
    weight_version_bytes: int
    losses: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """``exp(test_loss)``: among how many characters the model is as good as undecided."""
        return math.exp(self.test_loss) if self.test_loss < _LARGEST_LOSS else math.inf


@dataclass(frozen=True)
class MethodResult:
    """The runs of one method, one per seed."""

    method: str
    runs: tuple[Run, ...]

    @property
    def test_accuracy(self) -> float:
        """Mean over seeds, 0 to 1."""
        return statistics.fmean(run.test_accuracy for run in self.runs)

    @property
    def test_accuracy_std(self) -> float:
        """Sample standard deviation over seeds; 0 for a single one."""
        return _deviation([run.test_accuracy for run in self.runs])

    @property
    def test_loss(self) -> float:
        """Mean over seeds; not finite when a run diverged."""
        return statistics.fmean(run.test_loss for run in self.runs)

    @property
    def test_loss_std(self) -> float:
        """Sample standard deviation over seeds; 0 for a single one."""
        return _deviation([run.test_loss for run in self.runs])

    @property
    def perplexity(self) -> float:
        """Mean over seeds; not finite when a run diverged."""
        return statistics.fmean(run.perplexity for run in self.runs)

    @property
    def perplexity_std(self) -> float:
        """Sample standard deviation over seeds; 0 for a single one."""
        return _deviation([run.perplexity for run in self.runs])

    @property
    def minibatches_per_second(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(run.minibatches_per_second for run in self.runs)

    @property
    def weight_version_bytes(self) -> int:
        """Largest over seeds."""
        return max(run.weight_version_bytes for run in self.runs)


def summarize(runs: Sequence[Run]) -> list[MethodResult]:
    """Group ``runs`` by method, in the order in which the methods first appear."""
    methods = dict.fromkeys(run.method for run in runs)
    return [
        MethodResult(method, tuple(run for run in runs if run.method == method))
        for method in methods
    ]


def write_results(
    path: Path,
    results: Sequence[MethodResult],
    *,
    settings: Mapping[str, object],
    versions: Mapping[str, str],
) -> None:
    """Write ``results`` to ``path`` as JSON.

    ``methods`` lists one object per method: ``method``, ``test_accuracy`` (0..1), ``test_loss``,
    ``minibatches_per_second`` and ``weight_version_bytes``, means over the seeds, then the standard
    deviations, the perplexity, and the single runs with their training losses. A number that is not
    finite (a run that diverged) becomes null, which JSON can hold.
    """
    document = {
        "methods": [_as_json(result) for result in results],
        "settings": dict(settings),
        "versions": dict(versions),
    }
    write_atomically(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def _as_json(result: MethodResult) -> dict[str, Any]:
    return {
        "method": result.method,
        "test_accuracy": result.test_accuracy,
        "test_loss": _finite(result.test_loss),
        "minibatches_per_second": result.minibatches_per_second,
        "weight_version_bytes": result.weight_version_bytes,
        "test_accuracy_std": result.test_accuracy_std,
        "test_loss_std": _finite(result.test_loss_std),
        "perplexity": _finite(result.perplexity),
        "perplexity_std": _finite(result.perplexity_std),
        "seeds": [
            {
                "seed": run.seed,
                "test_accuracy": run.test_accuracy,
                "test_loss": _finite(run.test_loss),
                "perplexity": _finite(run.perplexity),
                "minibatches_per_second": run.minibatches_per_second,
                "train_losses": [_finite(round(loss, 6)) for loss in run.losses],
            }
            for run in result.runs
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _deviation(values: list[float]) -> float:
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return statistics.stdev(values) if len(values) > 1 else 0.0
