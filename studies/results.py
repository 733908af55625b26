"""Averages training runs over seeds, defines metrics, and reads and writes the JSON files."""

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from spectrain_ext.files import finite, read_json, replace_file

from .looks import REFERENCE

_LARGEST_LOSS = 700.0  # the exponential of more is not a float64
_LARGEST = 1 << 28  # bytes of a run's file; a million losses take 20 million


@dataclass(frozen=True)
class Run:
    """One method trained with one seed.

    ``test_accuracy`` is the fraction (0 to 1) of targets (classes or next characters) predicted
    correctly, ``test_loss`` the workload's mean loss, ``losses`` the training loss of every
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
        return math.exp(self.test_loss) if self.test_loss < _LARGEST_LOSS else math.inf

    @classmethod
    def of_json(cls, run: dict[str, Any]) -> Self:
        return cls(
            method=str(run.pop("method")),
            seed=int(run.pop("seed")),
            weight_version_bytes=int(run.pop("weight_version_bytes")),
            losses=tuple(float(loss) for loss in run.pop("losses")),
            **{name: float(value) for name, value in run.items()},
        )

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["losses"] = [as_json(loss) for loss in self.losses]
        return values | {key: as_json(values[key]) for key in ("test_loss", "test_accuracy")}


@dataclass(frozen=True)
class MethodResult:
    """The runs of one method, one per seed."""

    method: str
    runs: tuple[Run, ...]

    def mean(self, figure: str) -> float:
        """Return the mean of a figure over seeds; not finite if a run diverged."""
        return statistics.fmean(getattr(run, figure) for run in self.runs)

    def deviation(self, figure: str) -> float:
        """Return the sample standard deviation over seeds, 0 for a single seed."""
        values = [getattr(run, figure) for run in self.runs]
        if not all(math.isfinite(value) for value in values):
            return math.nan
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def weight_version_bytes(self) -> int:
        """Return the largest value over seeds."""
        return max(run.weight_version_bytes for run in self.runs)


def summarize(runs: Sequence[Run]) -> list[MethodResult]:
    methods = dict.fromkeys(run.method for run in runs)
    return [
        MethodResult(method, tuple(run for run in runs if run.method == method))
        for method in methods
    ]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric by which a comparison ranks methods."""

    figure: str  # its name in ``Run``
    scale: int = 1  # from the figure to the displayed unit
    heading: str  # of the table column
    unit: str = ""  # after a value in running text
    digits: int  # after the decimal point
    higher_is_better: bool = False
    loss_unit: str

    def mean(self, result: MethodResult) -> float:
        """Return the mean over seeds in the unit of the heading."""
        return self.scale * result.mean(self.figure)

    def text(self, result: MethodResult) -> str:
        return in_words(result, self.figure, self.digits, self.scale)

    def best(self, results: Sequence[MethodResult]) -> float | None:
        """Return the best mean of the methods, without the reference, which does not overlap."""
        means = [self.mean(result) for result in results if result.method != REFERENCE]
        known = [mean for mean in means if math.isfinite(mean)]
        if len(means) < 2 or not known:
            return None
        return max(known) if self.higher_is_better else min(known)


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
    heading="test\nperplexity",
    unit=" perplexity",
    digits=2,
    loss_unit="nats per character",
)
LOSS = Metric(figure="test_loss", heading="mean\ntest loss", digits=3, loss_unit="of the workload")
#: Metrics by the name that a workload gives in ``judged``.
METRICS = {"accuracy": ACCURACY, "perplexity": PERPLEXITY, "loss": LOSS}


def write_results(
    path: Path,
    results: Sequence[MethodResult],
    *,
    settings: Mapping[str, object],
    versions: Mapping[str, str],
    times: Mapping[str, float] = {},
) -> None:
    """Write ``results`` as JSON (bench/results/FILES.md); ``times`` are simulated, by method."""
    document = {
        "methods": [finite(_as_json(result, times.get(result.method))) for result in results],
        "settings": dict(settings),
        "versions": dict(versions),
    }
    replace_file(path, f"{json.dumps(document, indent=2, allow_nan=False)}\n".encode())


def _as_json(result: MethodResult, time: float | None) -> dict[str, Any]:
    judged = ("test_accuracy", "test_loss", "perplexity")
    return {
        "method": result.method,
        "test_accuracy": result.mean("test_accuracy"),
        "test_loss": result.mean("test_loss"),
        "minibatches_per_second": result.mean("minibatches_per_second"),
        "weight_version_bytes": result.weight_version_bytes,
        **{f"{figure}_std": result.deviation(figure) for figure in judged},
        "perplexity": result.mean("perplexity"),
        "simulated_time": time,
        "seeds": [
            {
                "seed": run.seed,
                **{figure: getattr(run, figure) for figure in judged},
                "minibatches_per_second": run.minibatches_per_second,
                "train_losses": [round(loss, 6) for loss in run.losses],
            }
            for run in result.runs
        ],
    }


class Kept(Protocol):
    """A run that a file keeps."""

    @classmethod
    def of_json(cls, run: dict[str, Any]) -> Self: ...

    def to_json(self) -> dict[str, Any]: ...


K = TypeVar("K", bound=Kept)


class RunFile(Generic[K]):
    """The JSON file of a run, found by its name and all that it depends on."""

    def __init__(self, folder: Path, name: str, about: Mapping[str, object], kind: type[K]) -> None:
        text = json.dumps(dict(about), sort_keys=True)
        self._about, self._kind = json.loads(text), kind
        key = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{name}-{key}.json"

    def read(self) -> K | None:
        """Return the finished run, or None if it does not exist or its file is damaged."""
        try:
            document = read_json(self.path, _LARGEST)
            same = document["settings"] == self._about
            return self._kind.of_json(document["run"]) if same else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None

    def write(self, run: K) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = {"settings": self._about, "run": run.to_json()}
        replace_file(self.path, f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode())


def as_json(value: float) -> float | str:
    """Return a number for JSON: inf and nan become strings, which ``float`` parses."""
    return value if math.isfinite(value) else str(value)
