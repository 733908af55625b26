"""Tests data from files: digits, texts, CIFAR-10 read whole, nothing run, in bounded memory."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import re
import struct
import sys
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.study_data import FOLDER, TRAIN, archive, batch, images, jpeg, write_batches

import spectrain_ext
import studies
from studies.data import cifar_files, split
from studies.data.cifar_files import tar_files
from studies.data.sources import load_cifar10, load_digits, load_text
from studies.data.split import Batches, Split, Windows, augment
from studies.workload import epochs_of


def test_digits_are_scaled_and_split_once_and_for_all() -> None:
    whole = pytest.importorskip("sklearn.datasets").load_digits()
    data, again = load_digits(), load_digits()
    assert (data.train_inputs.shape, data.test_inputs.shape) == ((1437, 64), (360, 64))
    assert set(data.train_targets.tolist()) == set(data.test_targets.tolist()) == set(range(10))
    rows = torch.cat([data.train_inputs, data.test_inputs]).add(0.3).mul(16)
    torch.testing.assert_close(rows, rows.round(), rtol=0, atol=1e-5)
    targets = torch.cat([data.train_targets, data.test_targets]).tolist()
    found = sorted(zip(rows.round().tolist(), targets, strict=True))
    assert found == sorted(zip(whole.data.tolist(), whole.target.tolist(), strict=True))
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
    assert load_text(tmp_path, context=4).fingerprint == data.fingerprint
    path.write_text(f"{TEXT}y")
    assert load_text(path, context=4).fingerprint != data.fingerprint


def test_windows_begin_anywhere_in_the_training_text_and_some_sequences_are_tested(
    tmp_path: Path,
) -> None:
    (tmp_path / "alphabet.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 10)
    data = load_text(tmp_path, context=5)
    text = torch.tensor([i % 26 for i in range(234)])[: len(data.train_inputs) * 5 + 1]
    windows = Windows(data, batch_size=6, seed=1)
    drawn = [*windows]
    assert len(drawn) == len(windows) == -(-len(text) // 30)
    starts = torch.cat([inputs[:, 0] for inputs, _ in drawn])
    assert len(starts.unique()) > 20, "not only multiples of 5"
    known = {tuple(text[i : i + 6].tolist()) for i in range(len(text) - 5)}
    for inputs, targets in drawn:
        assert inputs.shape == targets.shape == (6, 5)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        whole = torch.cat([inputs, targets[:, -1:]], 1)
        assert {tuple(row.tolist()) for row in whole} <= known
    again, other = (next(iter(Windows(data, batch_size=6, seed=s)))[0] for s in (1, 2))
    assert torch.equal(again, drawn[0][0]) and not torch.equal(other, again)
    ((inputs, targets),) = split.Tests(data, every=2)
    assert torch.equal(inputs, data.test_inputs[::2]) and len(targets) == len(inputs)


def test_bad_files_are_named(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"\xff\xfe"), ("two/a.txt", b"too short"), ("two/b.txt", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    (tmp_path / "large.text").touch()
    os.truncate(tmp_path / "large.text", 2**40)
    for name, error, said in (
        ("nowhere.txt", FileNotFoundError, r"nowhere\.txt: no such file"),
        (".", ValueError, r"a\.txt: expected a UTF-8 text"),
        ("two", ValueError, r"found a\.txt, b\.txt; name the file"),
        ("two/a.txt", ValueError, r"a\.txt: its 9 characters are too few .* of 4"),
        ("large.text", ValueError, "expected at most 268435456 bytes"),
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


# CIFAR-10, from its authors' pickles or from tars of JPEG files


def stored(pairs: Any) -> list[tuple[bytes, int]]:
    """Return images and labels in an order of their own."""
    return sorted((np.asarray(image).tobytes(), int(label)) for image, label in pairs)


def python2_pickle(pixels: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """Imitate Python 2, which wrote the originals: strings for bytes, numpy's old module names."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    rows, columns = (b"J" + struct.pack("<i", size) for size in pixels.shape)
    minus_one = b"J" + struct.pack("<i", -1)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + rows + columns + b"\x86cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03"
    )
    array += text(b"|") + b"NNN" + 2 * minus_one + b"K\x00tb\x89" + text(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.mark.parametrize("form", ["folder-above", "archive", "python-2", 2, 4])
def test_pickled_batches_are_read_whole_in_a_fixed_order_that_mixes_them(
    tmp_path: Path, form: str | int
) -> None:
    batches = write_batches(tmp_path)
    folder = tmp_path / FOLDER
    plain = load_cifar10(folder)
    path = tmp_path if form == "folder-above" else folder
    if form == "archive":
        path = tmp_path / "packed"
        path.mkdir()
        with tarfile.open(path / "cifar-10-python.tar.gz", "w:gz") as packed:
            packed.add(folder, FOLDER)
    for name, each in batches.items():
        if isinstance(form, int):  # keys of text, labels first, other fields around them
            fields = {key.decode(): value for key, value in reversed(each.items())}
            fields = {"batch_label": "a batch", "num_vis": 3072, **fields, "filenames": ["0.png"]}
            (folder / name).write_bytes(pickle.dumps(fields, form))
        elif form == "python-2":
            (folder / name).write_bytes(python2_pickle(each[b"data"], each[b"labels"]))
    data = load_cifar10(path)
    assert (data.name, data.kind, data.classes) == ("CIFAR-10", "images", 10)
    assert data.train_inputs.shape == (35, 3, 32, 32)
    train, test = [batches[name] for name in TRAIN], [batches["test_batch"]]
    for inputs, targets, each in (
        (data.train_inputs, data.train_targets, train),
        (data.test_inputs, data.test_targets, test),
    ):
        expected = [pair for b in each for pair in zip(b[b"data"], b[b"labels"], strict=True)]
        assert stored(zip(inputs, targets, strict=True)) == stored(expected)
    assert torch.equal(data.train_inputs, plain.train_inputs)
    assert data.fingerprint == plain.fingerprint
    assert data.train_targets.tolist() != [label for b in train for label in b[b"labels"]]


def pointers() -> bytes:
    """Return an array whose bytes numpy takes for pointers, with only numpy's own names."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    # the dtype's flags, without the one for a list of objects
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
    dtype += b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3dtb"
    state = b"(K\x01K\x03\x85" + dtype + b"\x89C\x18" + b"A" * 24 + b"tb"
    return b"\x80\x03}(X\x04\x00\x00\x00data" + array + state + b"X\x06\x00\x00\x00labels](K\x01eu."


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"no pickle", "test_batch: .*expected a pickled batch"),
        (pickle.dumps(batch(2, 3))[:-40], "test_batch: .*expected a pickled batch"),
        (b"\x80\x04" + b"]" * 10**6, "test_batch: .*expected a pickled batch"),
        (pointers(), "'data', uint8"),
        (Runs(), "'data', uint8"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [2**70]}, "numbers below 256"),
        ({"data": np.zeros((2, 9), np.uint8)}, r"test_batch: .*shape \(samples, 3072\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "test_batch: .*a list of 2"),
        ({"data": np.zeros((2, 3072), "u1", "F"), "labels": [1, 2]}, "'data', uint8"),
        ({"data": np.zeros((2, 3072), "i1"), "labels": [1, 2]}, "test_batch: .*'data', uint8"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [10]}, "test labels: .*0 to 9"),
        (None, "test_batch is missing"),
    ],
    ids=range(12),
)
def test_a_broken_batch_is_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_batches(tmp_path)
    path = tmp_path / FOLDER / "test_batch"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    if content is None:
        path.unlink()
    tracemalloc.start()
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        load_cifar10(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert not Path("made").exists()


RUNS = re.compile(
    r"^\s*(?:import|from) (?:c?[Pp]ickle|marshal|shelve|dill|cloudpickle|joblib|yaml|runpy)\b"
    r"|(?<!\w\.)\b(?:exec|__import__)\(|= (?:eval|compile)\("
    r"|\b(?:torch|np|numpy)\.(?:load|fromfile|memmap)\((?!.*(?:allow_pickle=Fal|weights_only=Tr))",
    re.MULTILINE,
)


def test_no_file_is_run() -> None:
    for package in (spectrain_ext, studies):
        for path in Path(package.__file__).parent.rglob("*.py"):
            assert not RUNS.search(path.read_text(encoding="utf-8")), path


def test_a_tar_that_is_too_large_or_cut_short_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_files, "_LARGEST_ARCHIVE", 10**7)
    path = archive(tmp_path / "a", [("a.txt", b"hello"), ("b", b"x" * 2000)])
    with pytest.raises(ValueError, match="a: expected a whole tar file, but 'b' has 2000 bytes"):
        list(tar_files(path, lambda name: True, largest=1999))
    whole, large, larger = path.read_bytes(), tarfile.TarInfo("other"), tarfile.TarInfo("b")
    large.size, larger.size = 2 * 10**7, 10**15
    damaged = [larger.tobuf()]  # more than the file has
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        bombs = pack(large.tobuf() + bytes(2 * 10**7)), pack(bytes(2 * 10**7))
        damaged += [pack(whole)[:-30], *bombs]
    for content in damaged:
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(ValueError, match="a: expected a whole tar file, but"):
            list(tar_files(path, lambda name: True, largest=10**6))
        assert tracemalloc.get_traced_memory()[1] < 10**7
        tracemalloc.stop()


def test_jpeg_files_are_decoded_once_and_kept_under_the_hash_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "my-cifar.tar.xz", tmp_path / "cache"
    archive(path, images(), "w:xz")
    data = load_cifar10(tmp_path, cache=cache)
    assert data.name == "CIFAR-10 (JPEG)"
    assert data.train_inputs.shape == data.test_inputs.shape == (20, 3, 32, 32)
    assert data.train_targets.bincount().tolist() == [2] * 10
    red, green, blue = data.train_inputs.float().mean((2, 3)).unbind(1)
    # within JPEG's losses
    assert (red - 25 * data.train_targets).abs().max() <= 4
    assert (torch.minimum(green, (green - 100).abs())).max() <= 4
    assert blue.max() <= 4 and data.test_inputs[:, 2].min() >= 250
    (kept,) = cache.iterdir()
    assert data.fingerprint.startswith(kept.stem.removeprefix("cifar10-"))
    with monkeypatch.context() as patch:
        patch.setattr(cifar_files, "read_images", None)
        again = load_cifar10(path, cache=cache).train_inputs
    assert torch.equal(again, data.train_inputs)
    assert again.stride() == data.train_inputs.stride(), "a convolution would round otherwise"
    written = kept.read_bytes()
    packed = io.BytesIO()
    np.savez_compressed(packed, train_images=np.zeros(10**8, np.uint8))  # 100 kB
    # as after an interruption; a small file that would be a large array
    for damaged in (written[: len(written) // 2], packed.getvalue()):
        kept.write_bytes(damaged)
        assert torch.equal(load_cifar10(path, cache=cache).train_inputs, again)
        assert kept.read_bytes() == written


def test_other_images_and_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(message: str, path: Path = tmp_path) -> None:
        with pytest.raises((ValueError, FileNotFoundError, ModuleNotFoundError), match=message):
            load_cifar10(path)

    says(r"nowhere: no such .*cifar-10-python\.tar\.gz", tmp_path / "nowhere")
    says("there is no CIFAR-10 in it; expected the folder cifar-10-batches-py")
    monkeypatch.setattr(cifar_files, "_MOST_IMAGES", 40)
    for members, expected in (
        (images(("train",)), "no test/<class>"),
        (images(size=31), r"train/classa/0\.jpg': expected 32x32 pixels"),
        (images(classes=9), r"same 10 classes .* got 'classa', 'classb'"),
        ([("train/cat/0.jpg", b"jpeg?")], r"cat/0\.jpg': expected a JPEG file"),
        ([(f"train/cat/{k}.jpg", jpeg()) for k in range(41)], "expected at most 40 images"),
    ):
        archive(tmp_path / "cifar.tar", members)
        says(expected)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL.Image", None)
        says("pip install -r studies/requirements.txt")
    (tmp_path / "CIFAR10.tar.gz").touch()
    says(r"found CIFAR10\.tar\.gz, cifar\.tar; name the file")
    write_batches(tmp_path)
    first, packed = tmp_path / FOLDER / "data_batch_1", tmp_path / "cifar-10-python.tar.gz"
    first.unlink()
    first.symlink_to("/dev/zero")
    says("data_batch_1: expected a plain file")
    first.unlink()
    says("data_batch_1 is missing")
    with tarfile.open(packed, "w:gz") as file:
        file.add(tmp_path / FOLDER, FOLDER)
    says("data_batch_1 is missing", packed)


def test_augmented_images_are_shifted_and_mirrored_as_the_seed_says(tmp_path: Path) -> None:
    image = torch.arange(1, 3 * 64 + 1, dtype=torch.uint8).view(1, 3, 8, 8)
    padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
    shifts = [padded[:, row : row + 8, col : col + 8] for row in range(9) for col in range(9)]
    possible = [shift.tolist() for shift in shifts] + [shift.flip(2).tolist() for shift in shifts]
    varied = augment(image.expand(400, 3, 8, 8), torch.Generator().manual_seed(0))
    assert len({possible.index(one.tolist()) for one in varied}) > 120  # of 162
    write_batches(tmp_path)
    data = load_cifar10(tmp_path)
    first, again, plain = (
        torch.cat([x for x, _ in Batches(data, batch_size=8, seed=0, augmented=augmented)])
        for augmented in (True, True, False)
    )
    assert torch.equal(first, again) and not torch.equal(first, plain)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    pixels = data.train_inputs[order] / 255
    mean, deviation = (0.4914, 0.4822, 0.44653), (0.247, 0.2435, 0.26159)  # CIFAR-10's
    each = zip(pixels.unbind(1), mean, deviation, strict=True)
    expected = torch.stack([(color - m) / d for color, m, d in each], 1)
    torch.testing.assert_close(plain, expected, rtol=1e-3, atol=1e-3)
