"""Tables of committed runs of `python -m studies train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from table import table

DIGITS = "2026-11-22-train-digits"
TEXT = "2026-11-21-train-text-quick"
IMAGES = "2026-11-21-train-cifar10-quick"


def digits(results: Path) -> str:
    """Accuracy, loss and weights of every method on the digits."""
    lines = [
        [
            f"`{one['method']}`",
            accuracy(one),
            f"{one['test_loss']:.3f} ± {one['test_loss_std']:.3f}",
            f"{one['weight_version_bytes'] / 1024:.0f}",
        ]
        for one in methods(results, DIGITS)
    ]
    return table("method|>test accuracy %|>test loss|>peak weight versions, KiB", lines)


def longer(results: Path, method: str) -> str:
    """Simulated time of a minibatch of digits, over that without a bubble."""
    found = {one["method"]: one["simulated_time"] for one in methods(results, DIGITS)}
    return f"{found[method]:.1f} times"


def small(results: Path) -> str:
    """Text and images, small and far from converged."""
    images = {one["method"]: one for one in methods(results, IMAGES)}
    lines = [
        [
            f"`{one['method']}`",
            f"{one['perplexity']:.2f} ± {one['perplexity_std']:.2f}",
            accuracy(images[one["method"]]),
        ]
        for one in methods(results, TEXT)
    ]
    return table("method|>text, test perplexity|>CIFAR-10, test accuracy %", lines)


def accuracy(one: dict[str, Any]) -> str:
    return f"{100 * one['test_accuracy']:.1f} ± {100 * one['test_accuracy_std']:.1f}"


def methods(results: Path, folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((results / folder / "results.json").read_text())[
        "methods"
    ]
    return found
