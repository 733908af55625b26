"""CIFAR-10 as a tar file of JPEG files: ``train/<class>/<name>.jpg``, ``test/<class>/...``."""

import io
import lzma
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from spectrain_ext.data.cifar_arrays import CLASSES, SIDE, Arrays

_SUFFIXES = (".jpg", ".jpeg")


def read_tar(path: Path) -> Arrays:
    """Decode all images, which takes half a minute; classes are numbered in alphabetic order.

    Raises:
        FileNotFoundError: a part has no images.
        ValueError: it is no tar file, the parts do not have the same ten classes, or a file is no
            image of 32x32 pixels.
        ModuleNotFoundError: Pillow is not installed; the message names the remedy.
    """
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "images in JPEG files need Pillow, which is not installed: "
            "pip install 'spectrain_ext[train]'",
            name=error.name,
        ) from error
    found: dict[str, dict[str, dict[str, np.ndarray[Any, Any]]]] = {"train": {}, "test": {}}
    try:
        # not as a stream (r|), which would take a file that was cut short for its end
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.suffix.lower() not in _SUFFIXES:
                    continue
                if len(name.parts) < 3 or name.parts[-3] not in found:
                    continue
                file = archive.extractfile(member)
                assert file is not None
                image = _decode(f"{path}: {member.name}", file.read())
                found[name.parts[-3]].setdefault(name.parts[-2], {})[name.name] = image
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole tar file, but {error}") from error
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
            f"{', '.join(names)} and {', '.join(sorted(found['test']))}"
        )
    return Arrays(*_arrays(found["train"]), *_arrays(found["test"]), lossy=True)


def _decode(where: str, content: bytes) -> np.ndarray[Any, Any]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            if image.size != (SIDE, SIDE):
                raise ValueError(f"{where}: expected {SIDE}x{SIDE} pixels, got {image.size}")
            pixels: np.ndarray[Any, Any] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            return pixels
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{where}: expected a JPEG file, but {error}") from error


def _arrays(
    classes: dict[str, dict[str, np.ndarray[Any, Any]]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images and labels by class and name, whatever the order in the file."""
    images = [classes[name][file] for name in sorted(classes) for file in sorted(classes[name])]
    counts = [len(classes[name]) for name in sorted(classes)]
    return np.stack(images), np.repeat(np.arange(len(counts), dtype=np.int64), counts)
