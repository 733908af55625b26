"""Measures layer times of whole models on one GPU, for `spectrain plan --profile` elsewhere."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from spectrain_ext.tools.planning import measure_layers, write_layers
from studies.examples import blocks_and_batch

from .cases import Cases
from .scale import Scale

_MODELS = ("vgg16", "resnet", "gpt")


def layers(cases: Cases, scale: Scale) -> None:
    """Run a case per model; the result is the profile as JSON."""

    def of(model: str) -> dict[str, Any]:
        blocks, batch = blocks_and_batch(model, 64 if scale.on_gpu else 1)
        measured = measure_layers(
            [block.to(scale.device) for block in blocks],
            batch.to(scale.device),
            repeats=scale.rounds,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layers.json"
            write_layers(path, measured)
            found: dict[str, Any] = json.loads(path.read_text())
        return found

    for model in _MODELS[: scale.few]:
        cases.run(model, lambda m=model: of(m))  # type: ignore[misc]
