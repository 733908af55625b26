"""Tests a text file as sequences of characters."""

from pathlib import Path

import pytest
import torch

from studies.data.sources import load_text
from studies.data.split import Batches

TEXT = "".join("abcdefghij"[n * n % 7] for n in range(95)) + "\u00e4\u20ac\n" + 102 * "x"


def _characters(tokens: torch.Tensor) -> str:
    vocabulary = sorted(set(TEXT))
    return "".join(vocabulary[token] for token in tokens.flatten().tolist())


@pytest.mark.parametrize("inside", [True, False], ids=["folder", "file"])
def test_sequences_follow_each_other_and_targets_are_one_further(
    tmp_path: Path, inside: bool
) -> None:
    path = tmp_path / "prose.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    data = load_text(tmp_path if inside else path, context=4)
    assert (data.name, data.kind, data.classes) == ("prose", "text", len(set(TEXT)))
    train, test = TEXT[:180], TEXT[180:]
    assert data.train_inputs.shape == data.train_targets.shape == (44, 4)
    assert _characters(data.train_inputs) == train[:176]
    assert _characters(data.train_targets) == train[1:177]
    assert data.test_inputs.shape == (4, 4)  # of 20 characters: the last target must exist
    assert _characters(data.test_targets) == test[1:17]
    assert data.train_inputs.dtype == data.train_targets.dtype == torch.int64


def test_no_test_character_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(90 * "a" + 10 * "b")
    data = load_text(path, context=3)
    assert data.train_inputs.max() == data.train_targets.max() == 0
    assert data.test_inputs.min() == 1


def test_batches_keep_inputs_and_targets_together(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(TEXT)
    data = load_text(path, context=5)
    for inputs, targets in Batches(data, batch_size=7, seed=1):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    prints = []
    for name, text in (("a.txt", TEXT), ("b.txt", TEXT), ("c.txt", TEXT + "y")):
        (tmp_path / name).write_text(text)
        prints.append(load_text(tmp_path / name, context=4).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.txt in it"):
        load_text(tmp_path, context=4)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt: no such file"):
        load_text(tmp_path / "nowhere.txt", context=4)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt: expected a UTF-8 text"):
        load_text(tmp_path, context=4)
    (tmp_path / "b.txt").write_text("too short")
    with pytest.raises(ValueError, match=r"found a\.txt, b\.txt; name the file"):
        load_text(tmp_path, context=4)
    with pytest.raises(ValueError, match=r"b\.txt: its 9 characters are too few .* of 4"):
        load_text(tmp_path / "b.txt", context=4)


def test_fewer_samples_are_the_first_ones(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(TEXT)
    data = load_text(path, context=4)
    part = data.first(10, None)
    assert torch.equal(part.train_targets, data.train_targets[:10])
    assert torch.equal(part.test_inputs, data.test_inputs)
    assert len(data.first(None, 2).test_targets) == 2
    assert len(data.first(10**6, None).train_inputs) == len(data.train_inputs)
