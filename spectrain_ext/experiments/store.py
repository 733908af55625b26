"""Finished runs in a folder, so that an interrupted comparison goes on where it stopped."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from spectrain_ext.files import read_json

from .files import write_atomically
from .results import Run

_LARGEST = 1 << 28  # bytes of a run; a million losses have 20 million


class RunStore:
    """One JSON file per run, found again by method, seed and everything else that it depends on.

    Args:
        folder: where the files are; it is made when the first one is written.
        settings: what the runs depend on besides method and seed, of values that JSON can hold.
            Runs of other settings may be in the folder: they are neither found nor touched.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps(dict(settings), sort_keys=True))
        text = json.dumps(self._settings, sort_keys=True)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, method: str, seed: int) -> Path:
        """The file of a run."""
        return self._folder / f"{method}-seed{seed}-{self._key}.json"

    def find(self, method: str, seed: int) -> Run | None:
        """Return the finished run, None if there is none, or its file is not what was written."""
        try:
            document = read_json(self.path(method, seed), _LARGEST)
            values = document["run"]
            losses = tuple(float(loss) for loss in values.pop("losses"))
            run = Run(
                method=str(values.pop("method")),
                seed=int(values.pop("seed")),
                weight_version_bytes=int(values.pop("weight_version_bytes")),
                losses=losses,
                **{name: float(value) for name, value in values.items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        same = document.get("settings") == self._settings
        sound = (
            0 <= run.test_accuracy <= 1
            and 0 <= run.minibatches_per_second < math.inf
            and run.weight_version_bytes >= 0
        )
        return run if same and sound and (run.method, run.seed) == (method, seed) else None

    def save(self, run: Run) -> None:
        """Write a finished run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        values = dataclasses.asdict(run)
        # JSON has no inf and no nan, but strings; float() reads both
        values["losses"] = [_as_json(loss) for loss in run.losses]
        values["test_loss"] = _as_json(run.test_loss)
        text = json.dumps({"settings": self._settings, "run": values}, indent=1, allow_nan=False)
        write_atomically(self.path(run.method, run.seed), text + "\n")


def _as_json(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)
