"""Turns a text file into data for a language model, one token per character."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from spectrain_ext.files import read_bounded

from .split import Split

_TRAIN_SHARE = 0.9
_LARGEST = 1 << 28  # bytes of a text; its tokens take eight times as much


def load_text(path: Path, *, context: int) -> Split:
    """Return the characters of a UTF-8 file as sequences with targets shifted by one.

    The first nine tenths of the text are the training part, the rest is the test part. The
    vocabulary is the text's characters in code-point order. Sequences do not overlap; a remainder
    at the end of a part is dropped.
    """
    path = _find(path)
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


def _find(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file; expected a text in UTF-8, or a folder with one (*.txt)"
            )
        return path
    found = sorted(path.glob("*.txt"))
    if not found:
        raise FileNotFoundError(f"{path}: there is no *.txt in it; expected a text in UTF-8")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: expected one *.txt, found {names}; name the file itself")
    return found[0]
