"""Loads CIFAR-10 (Krizhevsky, 2009) from files: 60,000 photographs of 32x32 pixels, ten classes."""

import hashlib
import io
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from spectrain_ext.files import replace_file

from . import cifar_files
from .cifar_files import Arrays
from .images import normalize
from .split import Split

_logger = logging.getLogger(__name__)
_ORDER_SEED = 0
_FORMATS = (
    "the folder cifar-10-batches-py or the file cifar-10-python.tar.gz, as torchvision's CIFAR10 "
    "leaves them, or a tar file (*cifar*.tar, .tar.gz, .tar.bz2, .tar.xz) of "
    "train/<class>/<name>.jpg and test/<class>/<name>.jpg"
)


def load_cifar10(path: Path, *, cache: Path | None = None) -> Split:
    """Return CIFAR-10 as uint8 images in a fixed random order.

    The order mixes the classes, so that the first samples of both parts cover all of them. Nothing
    in the files is executed, and nothing is written next to them.
    """
    source = _find(path)
    if source.is_dir() or source.name.startswith("cifar-10-python."):
        arrays = cifar_files.read_batches(source)
        fingerprint = arrays.fingerprint()
    else:
        with source.open("rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        kept = None if cache is None else cache / f"cifar10-{fingerprint[:16]}.npz"
        arrays = _through_cache(kept, lambda: cifar_files.read_images(source))
    name = "CIFAR-10 (JPEG)" if arrays.lossy else "CIFAR-10"
    train, test = (
        torch.randperm(len(labels), generator=torch.Generator().manual_seed(_ORDER_SEED))
        for labels in (arrays.train_labels, arrays.test_labels)
    )
    return Split(
        name,
        "images",
        torch.from_numpy(arrays.train_images)[train],
        torch.from_numpy(arrays.train_labels)[train],
        torch.from_numpy(arrays.test_images)[test],
        torch.from_numpy(arrays.test_labels)[test],
        classes=10,
        prepare=normalize,
        fingerprint=fingerprint,
    )


def _find(path: Path) -> Path:
    if path.is_file() or path.name == cifar_files.FOLDER:
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder; expected {_FORMATS}")
    for known in (path / cifar_files.FOLDER, path / cifar_files.ARCHIVE):
        if known.exists():
            return known
    found = sorted(
        file for file in path.iterdir() if "cifar" in file.name.lower() and ".tar" in file.suffixes
    )
    if not found:
        raise FileNotFoundError(f"{path}: there is no CIFAR-10 in it; expected {_FORMATS}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: expected one *cifar*.tar*, found {names}; name the file itself")
    return found[0]


def _through_cache(path: Path | None, read: Callable[[], Arrays]) -> Arrays:
    """Return the content of ``path`` if it is intact; otherwise call ``read`` and write it."""
    if path is not None and path.exists():
        try:
            # not compressed: a small file could otherwise hold a large array
            with zipfile.ZipFile(path) as archive:
                stored = all(m.compress_type == zipfile.ZIP_STORED for m in archive.infolist())
            if stored:
                with np.load(path, allow_pickle=False) as kept:
                    return Arrays(**{key: kept[key] for key in Arrays.NAMES}, lossy=True)
        except Exception:  # any error from a truncated or foreign file
            _logger.info("%s is damaged; decoding the images again", path)
    arrays = read()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **{key: getattr(arrays, key) for key in Arrays.NAMES})
        replace_file(path, content.getvalue())
    return arrays
