"""CIFAR-10 as a tar file of JPEG files: ``train/<class>/<name>.jpg``, ``test/<class>/...``."""

import io
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from spectrain_ext.extras import require

from .cifar_arrays import CLASSES, SIDE, Arrays
from .tar import tar_files

_SUFFIXES = (".jpg", ".jpeg")
_LARGEST = 1 << 20  # bytes of an image; 32x32 pixels need about a thousand
_MOST = 100_000  # images; CIFAR-10 has 60,000


def read_tar(path: Path) -> Arrays:
    """Decode all images, which takes half a minute; classes are numbered in alphabetic order.

    Raises:
        FileNotFoundError: a part has no images.
        ValueError: it is no tar file, the parts do not have the same ten classes, a file is no
            image of 32x32 pixels or has more than 1 MiB, or there are more than 100,000.
        ModuleNotFoundError: Pillow is not installed; the message names the remedy.
    """
    require("PIL.Image", "images in JPEG files need Pillow")
    found: dict[str, dict[str, dict[str, np.ndarray[Any, Any]]]] = {"train": {}, "test": {}}
    for count, (member, content) in enumerate(
        tar_files(path, lambda name: _place(name) is not None, largest=_LARGEST), 1
    ):
        if count > _MOST:
            raise ValueError(f"{path}: expected at most {_MOST} images, got more")
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
    return Arrays(*_arrays(found["train"]), *_arrays(found["test"]), lossy=True)


def _place(name: str) -> tuple[str, str, str] | None:
    """Part, class and file name of a member; None: it is no image of either part."""
    path = PurePosixPath(name)
    if path.suffix.lower() not in _SUFFIXES or len(path.parts) < 3:
        return None
    part, kind, file = path.parts[-3:]
    return (part, kind, file) if part in ("train", "test") else None


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > CLASSES + 1 else ""
    return ", ".join(map(repr, names[: CLASSES + 1])) + more


def _decode(where: str, content: bytes) -> np.ndarray[Any, Any]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            size = image.size  # of the header: nothing is decoded yet
            if size == (SIDE, SIDE):
                pixels: np.ndarray[Any, Any] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
                return pixels
    except Exception as error:  # whatever Pillow finds in a damaged or a huge one
        raise ValueError(f"{where}: expected a JPEG file, but {error}") from error
    raise ValueError(f"{where}: expected {SIDE}x{SIDE} pixels, got {size}")


def _arrays(
    classes: dict[str, dict[str, np.ndarray[Any, Any]]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images and labels by class and name, whatever the order in the file."""
    images = [classes[name][file] for name in sorted(classes) for file in sorted(classes[name])]
    counts = [len(classes[name]) for name in sorted(classes)]
    return np.stack(images), np.repeat(np.arange(len(counts), dtype=np.int64), counts)
