"""Map the name of every table in a document to a function of the committed runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from table import table

from . import quality, races, speed


def headline(results: Path) -> str:
    """The README's answers: throughput, time to a loss, and the loss itself."""
    torch = speed.over_torch(results)
    times = [r.to_loss(0.75) for r in races.defaults(results)]
    gaps = quality.late_by_one(results)
    lowest, highest = (
        f"{abs(100 * gap):.1f} % {'below' if gap < 0 else 'above'}"
        for gap in (min(gaps), max(gaps))
    )
    lines = [
        [
            "torch's 1F1B with as many microbatches",
            "2 to 4 processes on a CPU",
            f"{min(torch):.2f} to {max(torch):.2f} times the throughput",
        ],
        [
            "time of `1f1b` to a loss, 4 to 32 stages",
            "measured updates, simulated time",
            f"{min(times):.2f} to {max(times):.2f} times as long",
        ],
        [
            "test loss of synchronous training, 4 to 32 stages",
            "small transformer on a CPU",
            f"between {lowest} and {highest}",
        ],
    ]
    return table("compared with|measured|result", lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "accuracy": quality.accuracies,
    "accuracy.gaps": quality.gaps,
    "accuracy.published": quality.published,
    "cost.memory": speed.memory,
    "cost.update": speed.update,
    "errors": quality.errors,
    "frontier": quality.summary,
    "frontier.deep": quality.deep,
    "frontier.digits": quality.digits,
    "frontier.even": races.even,
    "frontier.feedback": quality.feedback,
    "frontier.text": quality.text,
    "gpu.steps": speed.gpu_steps,
    "headline": headline,
    "operators": speed.operators,
    "operators.gpu": partial(speed.operators, run=speed.ON_GPU),
    "operators.gpu.targets": partial(speed.operator_targets, run=speed.ON_GPU),
    "operators.targets": speed.operator_targets,
    "planner": speed.planner,
    "processes": speed.processes,
    "restarts": speed.restarts,
    "slow-links": speed.slow_links,
    "train": quality.trained,
}
