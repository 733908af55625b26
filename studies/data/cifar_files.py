"""Reads CIFAR-10 from its authors' pickles of arrays or from a tar file of JPEG images.

Torchvision leaves the same pickles. Nothing in a pickle is executed, and numpy receives only bytes.
JPEG files are ``train/<class>/<name>.jpg`` and ``test/<class>/<name>.jpg``.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeGuard

import numpy as np

from spectrain_ext.extras import require
from spectrain_ext.files import read_bounded
from studies import REMEDY

from .pickles import Call, read_pickle
from .tar import tar_files

CLASSES = 10
SIDE = 32
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_VALUES = 3 * SIDE * SIDE
_LARGEST_BATCH = 1 << 26  # bytes of a batch; the originals have 31 million

_SUFFIXES = (".jpg", ".jpeg")
_LARGEST_IMAGE = 1 << 20  # bytes of an image; 32x32 pixels need about a thousand
_MOST_IMAGES = 100_000  # images; CIFAR-10 has 60,000

_Array = np.ndarray[Any, Any]
_Batch = tuple[_Array, _Array]


@dataclass(frozen=True)
class Arrays:
    """Images are uint8 ``(samples, 3, 32, 32)``, labels int64 ``(samples,)`` below 10.

    ``lossy`` means that the images are not the original pixels.
    """

    NAMES: ClassVar = ("train_images", "train_labels", "test_images", "test_labels")

    train_images: _Array
    train_labels: _Array
    test_images: _Array
    test_labels: _Array
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
        digest = hashlib.sha256()
        for name in self.NAMES:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()


# Pickled batches


def read_folder(folder: Path) -> Arrays:
    """Read the six batches in ``folder``."""
    batches = {}
    for name in _TRAIN + _TEST:
        try:
            content = read_bounded(folder / name, _LARGEST_BATCH)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder}: {name} is missing; expected {', '.join(_TRAIN + _TEST)}, pickled "
                "batches as torchvision's CIFAR10 unpacks them"
            ) from None
        batches[name] = _batch(f"{folder}: {name}", content)
    return _joined(batches)


def read_archive(path: Path) -> Arrays:
    """Read the six batches from the archive without unpacking it."""
    members = {f"{FOLDER}/{name}": name for name in _TRAIN + _TEST}
    batches = {}
    for member, content in tar_files(
        path, lambda name: str(PurePosixPath(name)) in members, largest=_LARGEST_BATCH
    ):
        name = members[str(PurePosixPath(member))]
        batches[name] = _batch(f"{path}: {name}", content)
    for name in _TRAIN + _TEST:
        if name not in batches:
            raise FileNotFoundError(f"{path}: {FOLDER}/{name} is missing in it")
    return _joined(batches)


def _joined(batches: Mapping[str, _Batch]) -> Arrays:
    return Arrays(
        *(
            np.concatenate([batches[name][side] for name in names])
            for names in (_TRAIN, _TEST)
            for side in (0, 1)
        )
    )


def _batch(where: str, content: bytes) -> _Batch:
    try:
        read = read_pickle(content)
    except ValueError as error:
        raise ValueError(f"{where}: expected a pickled batch of CIFAR-10, but {error}") from error
    batch = read if isinstance(read, dict) else {}
    # Python 2 wrote the originals; its strings are bytes
    images, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", "labels"))
    pixels = _pixels(images)
    if pixels is None or len(pixels) % _VALUES:
        raise ValueError(f"{where}: expected 'data', uint8 of shape (samples, {_VALUES})")
    count = len(pixels) // _VALUES
    if not (
        isinstance(labels, list)
        and len(labels) == count
        and all(type(label) is int and 0 <= label < 256 for label in labels)
    ):
        raise ValueError(f"{where}: expected 'labels', a list of {count} numbers below 256")
    values = np.frombuffer(pixels, np.uint8).reshape(count, 3, SIDE, SIDE)
    return values, np.array(labels, dtype=np.int64)


def _pixels(array: object) -> bytes | None:
    """Return the bytes of a pickled array of uint8 ``(samples, 3072)``, None for anything else."""
    if not _calls(array, "_reconstruct", "numpy.core.multiarray", "numpy._core.multiarray"):
        return None
    state = array.state
    if not (isinstance(state, tuple) and len(state) == 5):
        return None
    _, shape, dtype, by_columns, content = state
    plain = (
        _calls(dtype, "dtype", "numpy")
        and dtype.arguments[:1] in (("u1",), (b"u1",))
        and by_columns is False
        and isinstance(content, bytes)
        and isinstance(shape, tuple)
        and len(shape) == 2
        and shape == (len(content) // _VALUES, _VALUES)
    )
    return content if plain else None


def _calls(value: Any, name: str, *modules: str) -> TypeGuard[Call]:
    return isinstance(value, Call) and value.name in {f"{module}.{name}" for module in modules}


# JPEG files


def read_images(path: Path) -> Arrays:
    """Decode all images, in half a minute; classes are numbered in alphabetical order."""
    require("PIL.Image", "images in JPEG files need Pillow", REMEDY)
    found: dict[str, dict[str, dict[str, _Array]]] = {"train": {}, "test": {}}
    for count, (member, content) in enumerate(
        tar_files(path, lambda name: _place(name) is not None, largest=_LARGEST_IMAGE), 1
    ):
        if count > _MOST_IMAGES:
            raise ValueError(f"{path}: expected at most {_MOST_IMAGES} images, got more")
        part, kind, name = _place(member) or ("", "", "")
        found[part].setdefault(kind, {})[name] = _decode(f"{path}: {member!r}", content)
    for part, classes in found.items():
        if not classes:
            raise FileNotFoundError(
                f"{path}: there is no {part}/<class>/<name>.jpg in it; expected a tar file of "
                "train/<class>/<name>.jpg and test/<class>/<name>.jpg"
            )
    names = sorted(found["train"])
    if len(names) != CLASSES or sorted(found["test"]) != names:
        raise ValueError(
            f"{path}: expected the same {CLASSES} classes in train/ and test/, got "
            f"{_listed(names)} and {_listed(sorted(found['test']))}"
        )
    return Arrays(*_in_order(found["train"]), *_in_order(found["test"]), lossy=True)


def _place(name: str) -> tuple[str, str, str] | None:
    """Return part, class and file name of a member, None if it is not an image of either part."""
    path = PurePosixPath(name)
    if path.suffix.lower() not in _SUFFIXES or len(path.parts) < 3:
        return None
    part, kind, file = path.parts[-3:]
    return (part, kind, file) if part in ("train", "test") else None


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > CLASSES + 1 else ""
    return ", ".join(map(repr, names[: CLASSES + 1])) + more


def _decode(where: str, content: bytes) -> _Array:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            size = image.size  # from the header, before decoding
            if size == (SIDE, SIDE):
                pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
                # The memory layout of a cached array: convolutions round differently with channels
                # last, and the same command would give other figures from its second run on.
                whole: _Array = np.ascontiguousarray(pixels)
                return whole
    except Exception as error:  # any error of Pillow from a damaged or huge image
        raise ValueError(f"{where}: expected a JPEG file, but {error}") from error
    raise ValueError(f"{where}: expected {SIDE}x{SIDE} pixels, got {size}")


def _in_order(classes: dict[str, dict[str, _Array]]) -> _Batch:
    """Return images and labels by class and name, independent of the order in the file."""
    images = [classes[name][file] for name in sorted(classes) for file in sorted(classes[name])]
    counts = [len(classes[name]) for name in sorted(classes)]
    return np.stack(images), np.repeat(np.arange(len(counts), dtype=np.int64), counts)
