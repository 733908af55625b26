"""Tests the digits, a text as sequences of characters, and the order of minibatches."""

import os
from pathlib import Path

import pytest
import torch

from studies.data.sources import load_digits, load_text
from studies.data.split import Batches, Split
from studies.workload import epochs_of


def test_digits_are_scaled_and_split_once_and_for_all() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data, again = load_digits(), load_digits()
    assert (data.train_inputs.shape, data.test_inputs.shape) == ((1437, 64), (360, 64))
    assert set(data.train_targets.tolist()) == set(data.test_targets.tolist()) == set(range(10))
    whole = datasets.load_digits()
    rows = torch.cat([data.train_inputs, data.test_inputs]).add(0.3).mul(16)
    targets = torch.cat([data.train_targets, data.test_targets]).tolist()
    found = sorted(zip(rows.round().tolist(), targets, strict=True))
    assert found == sorted(zip(whole.data.tolist(), whole.target.tolist(), strict=True))
    torch.testing.assert_close(rows, rows.round(), rtol=0, atol=1e-5)
    assert torch.equal(again.train_inputs, data.train_inputs)


TEXT = "".join("abcdefghij"[n * n % 7] for n in range(95)) + "\u00e4\u20ac\n" + 102 * "x"


def characters(tokens: torch.Tensor) -> str:
    vocabulary = sorted(set(TEXT))
    return "".join(vocabulary[token] for token in tokens.flatten().tolist())


def test_sequences_of_a_text_follow_each_other_and_targets_are_one_further(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    data = load_text(path, context=4)
    assert (data.name, data.kind, data.classes) == ("prose", "text", len(set(TEXT)))
    train, test = TEXT[:180], TEXT[180:]
    assert data.train_inputs.shape == data.train_targets.shape == (44, 4)
    assert characters(data.train_inputs) == train[:176]
    assert characters(data.train_targets) == train[1:177]
    assert data.test_inputs.shape == (4, 4)  # of 20 characters: the last target must exist
    assert characters(data.test_targets) == test[1:17]
    part = data.first(10, None)
    assert torch.equal(part.train_targets, data.train_targets[:10])
    assert torch.equal(part.test_inputs, data.test_inputs)
    assert len(data.first(None, 2).test_targets) == 2
    assert len(data.first(10**6, None).train_inputs) == len(data.train_inputs)
    assert load_text(tmp_path, context=4).fingerprint == data.fingerprint
    path.write_text(f"{TEXT}y")
    assert load_text(path, context=4).fingerprint != data.fingerprint


def test_bad_files_are_named(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"\xff\xfe"), ("two/a.txt", b"too short"), ("two/b.txt", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "b.txt").symlink_to("/dev/zero")
    (tmp_path / "empty").mkdir()
    (tmp_path / "large.text").touch()
    os.truncate(tmp_path / "large.text", 2**40)
    for name, error, said in (
        ("nowhere.txt", FileNotFoundError, r"nowhere\.txt: no such file"),
        (".", ValueError, r"a\.txt: expected a UTF-8 text"),
        ("two", ValueError, r"found a\.txt, b\.txt; name the file"),
        ("two/a.txt", ValueError, r"a\.txt: its 9 characters are too few .* of 4"),
        ("large.text", ValueError, "expected at most 268435456 bytes"),
        ("device", ValueError, r"b\.txt: expected a plain file"),
        ("empty", FileNotFoundError, r"no \*\.txt in it"),
    ):
        with pytest.raises(error, match=said):
            load_text(tmp_path / name, context=4)


def test_every_epoch_visits_every_sample_once_in_an_order_of_the_seed() -> None:
    inputs, targets = torch.arange(23.0).unsqueeze(1), torch.arange(23)
    data = Split("t", "features", inputs, targets, inputs, targets, classes=23)
    state = torch.random.get_rng_state()

    def orders(seed: int) -> list[list[int]]:
        batches = list(epochs_of(Batches(data, batch_size=5, seed=seed), 3))
        assert [len(x) for x, _ in batches] == [5, 5, 5, 5, 3] * 3
        assert all(torch.equal(x.squeeze(1), y.float()) for x, y in batches)
        return [torch.cat([y for _, y in batches[k : k + 5]]).tolist() for k in (0, 5, 10)]

    first = orders(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [sorted(order) for order in first] == [list(range(23))] * 3
    assert first[0] != first[1]
    assert orders(4) == first != orders(5)
