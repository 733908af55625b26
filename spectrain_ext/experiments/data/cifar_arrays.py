"""CIFAR-10's images and labels, checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

CLASSES = 10
SIDE = 32


@dataclass(frozen=True)
class Arrays:
    """Images are uint8 ``(samples, 3, 32, 32)``, labels int64 ``(samples,)`` below 10.

    ``lossy`` says that the images are not the original pixels.

    Raises:
        ValueError: an array has another type or shape, or a label is out of range.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        "train_images",
        "train_labels",
        "test_images",
        "test_labels",
    )

    train_images: np.ndarray[Any, Any]
    train_labels: np.ndarray[Any, Any]
    test_images: np.ndarray[Any, Any]
    test_labels: np.ndarray[Any, Any]
    lossy: bool = False

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            if images.dtype != np.uint8 or images.shape != (len(images), 3, SIDE, SIDE):
                raise ValueError(
                    f"{part} images: expected uint8 of shape (samples, 3, {SIDE}, {SIDE}), got "
                    f"{images.dtype} of shape {images.shape}"
                )
            if labels.dtype != np.int64 or labels.shape != (len(images),):
                raise ValueError(
                    f"{part} labels: expected int64 of shape ({len(images)},), got "
                    f"{labels.dtype} of shape {labels.shape}"
                )
            if not len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
                raise ValueError(f"{part} labels: expected some, all from 0 to {CLASSES - 1}")

    def fingerprint(self) -> str:
        """Hash of the content."""
        digest = hashlib.sha256()
        for name in self.NAMES:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()
