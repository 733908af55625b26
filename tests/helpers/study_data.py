"""Small files of the studies: CIFAR-10 as pickles and as JPEG files, a text, and results."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = "cifar-10-batches-py"
TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


def batch(samples: int, seed: int) -> dict[bytes, Any]:
    """Return random images that are the brighter the larger their label is."""
    labels = [(seed + n) % 10 for n in range(samples)]
    images = np.random.default_rng(seed).integers(0, 128, (samples, 3072))
    images += 12 * np.array(labels)[:, None]
    return {b"data": images.astype(np.uint8), b"labels": labels}


def write_batches(folder: Path, samples: int = 7) -> dict[str, dict[bytes, Any]]:
    """Write the six batches into a folder's cifar-10-batches-py."""
    folder = folder / FOLDER
    folder.mkdir(parents=True)
    batches = {name: batch(samples, seed) for seed, name in enumerate([*TRAIN, "test_batch"])}
    for name, content in batches.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return batches


def write_text(folder: Path) -> Path:
    words = ["pipeline ", "weight ", "stage ", "minibatch ", "gradient. "]
    path = folder / "text.txt"
    path.write_text("".join(words[n * n * n % 5] for n in range(1200)))
    return path


def archive(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w", **how: Any) -> Path:
    """Write a tar of (name, content); a single byte as the content is the type of a member."""
    with tarfile.open(path, mode, **how) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if len(content) != 1:
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = content, name
                file.addfile(member)
    return path


def jpeg(size: int = 32, color: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (size, size), color).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def images(
    parts: Sequence[str] = ("train", "test"), classes: int = 10, size: int = 32
) -> list[tuple[str, bytes]]:
    """Return two images of every class: red by class, green by sample, blue by part."""
    return [
        (
            f"./{part}/class{'abcdefghij'[number]}/{sample}.jpg",
            jpeg(size, (25 * number, 100 * sample, 0 if part == "train" else 255)),
        )
        for part in parts
        for number in range(classes)
        for sample in range(2)
    ]


def document_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def losses_in(folder: Path) -> dict[str, list[float]]:
    """Return the training losses of every method's first seed."""
    return {m["method"]: m["seeds"][0]["train_losses"] for m in document_in(folder)["methods"]}
