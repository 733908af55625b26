"""Loads the data sets: scikit-learn's digits, CIFAR-10 from files, and a text by character."""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spectrain_ext.extras import require
from spectrain_ext.files import read_bounded, replace_file
from studies import REMEDY

from . import cifar_files
from .cifar_files import Arrays
from .split import Split, normalize

# Digits

_TRAIN_SAMPLES = 1437
_SPLIT_SEED = 0


def load_digits() -> Split:
    """Return 1,437 training and 360 test samples; pixels 0..16 become ``x / 16 - 0.3``."""
    require("sklearn", "the digits data set comes with scikit-learn", REMEDY)
    from sklearn import datasets

    bunch = datasets.load_digits()
    # through lists: torch may have been built without NumPy support
    inputs = torch.tensor(bunch.data.tolist(), dtype=torch.float32).div_(16).sub_(0.3)
    targets = torch.tensor(bunch.target.tolist(), dtype=torch.int64)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    train, test = order[:_TRAIN_SAMPLES], order[_TRAIN_SAMPLES:]
    return Split(
        *("digits", "features", inputs[train], targets[train], inputs[test], targets[test]),
        classes=10,
    )


# CIFAR-10

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
    source = _cifar_in(path)
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


def _cifar_in(path: Path) -> Path:
    if path.is_file() or path.name == cifar_files.FOLDER:
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder; expected {_FORMATS}")
    for known in (path / cifar_files.FOLDER, path / cifar_files.ARCHIVE):
        if known.exists():
            return known
    tars = (file for file in path.iterdir() if "cifar" in file.name.lower())
    found = sorted(file for file in tars if ".tar" in file.suffixes)
    if not found:
        raise FileNotFoundError(f"{path}: there is no CIFAR-10 in it; expected {_FORMATS}")
    return _only(found, path, "*cifar*.tar*")


def _only(found: list[Path], path: Path, what: str) -> Path:
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: expected one {what}, found {names}; name the file itself")
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


# Text

_TRAIN_SHARE = 0.9
_LARGEST = 1 << 28  # bytes of a text; its tokens take eight times as much


def load_text(path: Path, *, context: int) -> Split:
    """Return the characters of a UTF-8 file as sequences with targets shifted by one.

    The first nine tenths of the text are the training part, the rest is the test part. The
    vocabulary is the text's characters in code-point order. Sequences do not overlap; a remainder
    at the end of a part is dropped.
    """
    path = _text_in(path)
    content = read_bounded(path, _LARGEST)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected a UTF-8 text, but {error}") from error
    vocabulary = {character: token for token, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([vocabulary[character] for character in text], dtype=torch.int64)
    cut = int(len(tokens) * _TRAIN_SHARE)
    # a sequence's last target is the character after it
    if min(cut, len(tokens) - cut) <= context:
        raise ValueError(
            f"{path}: its {len(tokens)} characters are too few for sequences of {context} in both "
            f"the first {_TRAIN_SHARE:.0%} (training) and the rest (test)"
        )
    train, train_targets = _sequences(tokens[:cut], context)
    test, test_targets = _sequences(tokens[cut:], context)
    return Split(
        *(path.stem, "text", train, train_targets, test, test_targets),
        classes=len(vocabulary),
        fingerprint=hashlib.sha256(content).hexdigest(),
    )


def _sequences(tokens: Tensor, context: int) -> tuple[Tensor, Tensor]:
    count = (len(tokens) - 1) // context
    length = count * context
    return tokens[:length].view(count, context), tokens[1 : length + 1].view(count, context)


def _text_in(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file; expected a text in UTF-8, or a folder with one (*.txt)"
            )
        return path
    found = sorted(path.glob("*.txt"))
    if not found:
        raise FileNotFoundError(f"{path}: there is no *.txt in it; expected a text in UTF-8")
    return _only(found, path, "*.txt")
