"""Tests damaged, forged and incomplete checkpoints: reported, never executed, and skipped."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_cases import batches, everything, model, pipeline, same, train
from helpers.forged_checkpoints import data_file, nest, refused
from hypothesis import given
from hypothesis import strategies as some
from safetensors import safe_open

from spectrain_ext.checkpoint import CheckpointManager, documents, load, save, storage
from spectrain_ext.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):
    pipe = pipeline(2)
    train(pipe, batches(3))
    save(tmp_path / "c", pipe, minibatches=3)
    return tmp_path / "c"


def test_missing_files(tmp_path, saved):
    refused(tmp_path / "none", r"none/checkpoint\.json: cannot be read, No such file")
    data_file(saved).unlink()
    refused(saved, r"model\.safetensors: cannot be read, No such file")


def test_truncated(saved):
    path = data_file(saved)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(saved, rf"model\.safetensors: damaged, expected {size} bytes, got {size - 1}")
    document = saved / documents.NAME
    os.truncate(document, document.stat().st_size // 2)
    refused(saved, r"checkpoint\.json: damaged, it is no checkpoint document")


@pytest.mark.parametrize(
    "key", ["model.0.linear.weight", "optimizer.state.3.norm.bias.momentum_buffer"]
)
def test_every_flipped_byte_of_a_tensor_is_found(saved, key):
    entry = documents.read(saved)["tensors"][key]
    path = saved / entry["file"]
    with safe_open(path, framework="pt") as opened:
        tensor = opened.get_tensor(key.removeprefix("model."))
        content = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    whole = path.read_bytes()
    assert whole.count(content) == 1
    for at in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(whole)
        changed[whole.index(content) + at] ^= 1
        path.write_bytes(changed)
        refused(saved, rf"{entry['file']}: damaged, the SHA-256 of '{key}' is not what was saved")


@given(place=some.floats(0, 1, exclude_max=True), bit=some.integers(0, 7))
def test_no_change_of_a_file_of_tensors_goes_unnoticed(tmp_path_factory, place, bit):
    directory = tmp_path_factory.getbasetemp() / "tensors"
    if not directory.exists():
        save(directory, model(blocks=1))
    path = data_file(directory)
    content = path.read_bytes()
    at = int(place * len(content))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    found = model(seed=1, blocks=1)
    try:
        load(directory, found, only_model=True)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:  # white space, or a name in the message
        same(found.state_dict(), model(blocks=1).state_dict())
    finally:
        path.write_bytes(content)


@given(place=some.floats(0, 1, exclude_max=True), bit=some.integers(0, 7))
def test_no_change_of_the_document_goes_unnoticed(tmp_path_factory, place, bit):
    directory = tmp_path_factory.getbasetemp() / "flipped"
    if not directory.exists():
        save(directory, model(blocks=1), extra=[1.5, "text"])
    path = directory / documents.NAME
    content = path.read_bytes()
    at = int(place * len(content))
    changed = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    other = directory.parent / "changed"
    other.mkdir(exist_ok=True)
    (other / documents.NAME).write_bytes(changed)
    try:
        assert documents.read(other) == documents.read(directory)  # white space
    except CheckpointError as error:
        assert str(other / documents.NAME) in str(error)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b.update(version=1), "expected version 2, got 1"),
        (lambda b: b.update(format="other"), "expected the format .*, got 'other'"),
        (lambda b: b.update(minibatches="3"), "minibatches: expected a int, got str"),
        (lambda b: b.pop("stages"), "stages: expected a list, got NoneType"),
        (lambda b: b["stages"][0].pop("random"), r"stages\[0\]: has no 'random'"),
        (lambda b: b["stages"].insert(0, 3), r"stages\[0\]: expected a dict, got int"),
        (lambda b: b["files"].update({"../../etc/passwd": 1}), "files: .* is no file of a ch"),
        (lambda b: next(iter(b["tensors"].values())).update(file="x"), "bad file, shape or order"),
        (lambda b: next(iter(b["tensors"].values())).update(shape=[-1]), "a number from 0, got -1"),
        (lambda b: next(iter(b["tensors"].values())).update(dtype="save"), "'save' is no dtype"),
        (
            lambda b: b["stages"][0]["optimizer"].update({"groups": [3]}),
            r"stages\[0\]\['optimizer'\]\['groups'\]\[0\]: expected a dict, got int",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "change",
)
def test_forged_documents(saved, change, match):
    path = saved / documents.NAME
    body = json.loads(path.read_text())["checkpoint"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({"sha256": digest.hexdigest(), "checkpoint": body}))
    refused(saved, match)


# Obstacles


def test_only_a_checkpoint_is_replaced_and_nothing_is_moved(tmp_path, saved):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "nowhere").symlink_to("none")
    before = sorted(path.name for path in tmp_path.iterdir())
    for name in ("file", "folder", "link", "nowhere"):
        with pytest.raises(FileExistsError, match=f"{name} is no checkpoint"):
            save(tmp_path / name, model(), overwrite=True)
        with pytest.raises(FileExistsError, match=f"{name} exists"):
            save(tmp_path / name, model())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", model(), overwrite=True)
    load(tmp_path / "empty", model())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (documents.NAME, '{"format": "mine"}'),
        (documents.NAME, ""),
        (documents.NAME, None),  # a folder
        ("model.safetensors", "mine"),
    ],
    ids=["json", "empty", "folder", "weights"],
)
def test_a_folder_with_the_name_of_a_checkpoints_file_is_none(tmp_path, name, content):
    path = tmp_path / "c" / name
    (path if content is None else path.parent).mkdir(parents=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(FileExistsError, match="c is no checkpoint; overwrite=True replaces only"):
        save(tmp_path / "c", model(), overwrite=True)
    assert content is None or path.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["notes.txt", "model-00001-of-00002.safetensors", "runs/1"])
@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_checkpoint_with_something_else_is_not_replaced(saved, monkeypatch, name, moment):
    other = saved / name

    def put_there(*given):
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
        return write_tensors(*given) if given else None

    if moment == "before":
        put_there()
    else:
        write_tensors = storage.write_tensors
        monkeypatch.setattr(storage, "write_tensors", put_there)
    match = rf"c holds '{name.partition('/')[0]}', which is no file of the checkpoint"
    with pytest.raises((FileExistsError, CheckpointError), match=match):
        save(saved, model(), overwrite=True)
    assert other.read_text() == "mine"
    load(saved, pipeline(2))
    assert [path.name for path in saved.parent.iterdir()] == ["c"]


@pytest.mark.parametrize("damage", ["version", "cut"])
def test_a_checkpoint_whose_document_cannot_be_used_is_replaced(saved, damage):
    document = saved / documents.NAME
    if damage == "cut":
        os.truncate(document, document.stat().st_size - 2)
    else:
        document.write_text(document.read_text().replace('"version": 2', '"version": 1'))
    refused(saved, r"checkpoint\.json: ")
    save(saved, model(), overwrite=True)
    load(saved, model())


def test_a_path_that_was_taken_during_the_save_is_not_replaced(tmp_path, monkeypatch):
    def meanwhile(*given):
        (tmp_path / "c").write_text("mine")
        return write_tensors(*given)

    write_tensors = storage.write_tensors
    monkeypatch.setattr(storage, "write_tensors", meanwhile)
    with pytest.raises(CheckpointError, match="c exists; overwrite=True replaces it"):
        save(tmp_path / "c", model())
    assert (tmp_path / "c").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_links_in_the_way_are_removed_and_not_followed(tmp_path, saved):
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("mine")
    where = tmp_path / "run"
    where.mkdir()
    for name in ("minibatch-00000000", "c", "latest"):
        (where / f".{name}.partial").symlink_to(target)
        (where / f".{name}.replaced").symlink_to(target / "precious")
    save(where / "c", model())
    manager = CheckpointManager(where, pipeline(2))
    manager.save()
    (where / ".latest.partial").symlink_to(target / "precious")
    (where / ".minibatch-00000000.partial").symlink_to(target / "none")
    manager.save()
    (where / ".minibatch-00000007.replaced").symlink_to(saved)
    (where / ".minibatch-00000008.partial").symlink_to(saved)
    assert CheckpointManager(where, pipeline(2)).restore().minibatches == 0
    assert [path.name for path in target.iterdir()] == ["precious"]
    assert (target / "precious").read_text() == "mine"
    left = {path.name for path in where.iterdir() if path.is_symlink()}
    assert left == {".latest.replaced"}  # not the package's file
    assert saved.is_dir()


@pytest.mark.parametrize("name", [documents.NAME, "model.safetensors"])
def test_pipes_and_devices_are_not_waited_for(saved, name):
    (saved / name).unlink()
    os.mkfifo(saved / name)
    refused(saved, f"{name}: .*expected a plain file")
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    refused(saved, f"{name}: .*expected a plain file")


def test_the_pointer_is_no_pipe_and_not_long(tmp_path):
    manager = CheckpointManager(tmp_path, pipeline(2))
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=r"latest: cannot be read: .*expected a plain file"):
        manager.restore()
    with pytest.raises(CheckpointError, match="expected a plain file"):
        manager.save()  # as root it would have replaced /dev/null
    assert (tmp_path / "latest").is_fifo()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_bytes(b"x" * 101)
    with pytest.raises(CheckpointError, match=r"latest: cannot be read: .*at most 100 bytes"):
        manager.latest()


def test_a_save_that_is_refused_leaves_nothing(tmp_path):
    for extra in ({"a": object()}, nest(1, 101), torch.tensor(1j)):
        with pytest.raises(TypeError, match="extra"):
            save(tmp_path / "c", model(), extra=extra)
    endless = []
    endless.append(endless)
    with pytest.raises(TypeError, match="more than 100 containers"):
        save(tmp_path / "c", model(), extra=endless)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "reason"),
    [("x" * 250, "File name too long"), ("file/c", "File exists"), ("c", "Read-only file system")],
    ids=["long", "file", "read-only"],
)
def test_a_place_where_nothing_can_be_written(tmp_path, monkeypatch, path, reason):
    def refuse(path, *_):
        raise OSError(errno.EROFS, "Read-only file system", path)

    (tmp_path / "file").touch()
    if path == "c":
        monkeypatch.setattr(os, "mkdir", refuse)
    match = f"path: {tmp_path / path} cannot be written, {reason}: {tmp_path}"
    with pytest.raises(CheckpointError, match=match):
        save(tmp_path / path, model())
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / path, model())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_document_is_not_written_that_could_not_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_LARGEST", 10**4)
    with pytest.raises(CheckpointError, match="bytes, expected less than 10000"):
        save(tmp_path / "c", model(), extra="x" * 10**4)
    assert not list(tmp_path.iterdir())


# Writing


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["spectrain_ext.checkpoint.storage.save_file", "os.fsync"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_leaves_the_last_one_whole(tmp_path, saved, monkeypatch, call, asynchronous):
    from spectrain_ext.checkpoint.saving import PendingCheckpoint
    from spectrain_ext.distributed.store import Peers

    expected = pipeline(2, seed=5)
    load(saved, expected)
    other = pipeline(2, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises((CheckpointError, OSError), match="No space left on device"):
            if asynchronous:
                PendingCheckpoint(saved, other, Peers(), overwrite=True).write_behind(
                    Peers()
                ).result()
            else:
                save(saved, other, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    load(saved, other)
    same(everything(other), everything(expected))


KILLED = """
import os, shutil, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # before the first fork
sys.path.insert(0, sys.argv[2])
from helpers.checkpoint_cases import batches, model, pipeline, train
from spectrain_ext import files
from spectrain_ext.checkpoint import CheckpointManager, load
base = Path(sys.argv[1])
if sys.argv[3] == "renames":
    files.exchanged = lambda *_: False
pipe = pipeline(2)
train(pipe, batches(2))
CheckpointManager(base / "begin", pipe).save()
old = model(seed=8)
load(base / "begin" / "minibatch-00000000", old)
train(pipe, batches(2))

def dying(real, left):
    def call(*args, **more):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return real(*args, **more)
    return call

def save_and_die(directory, left):
    manager = CheckpointManager(directory, pipe)
    counted = [left]
    os.fsync = lambda _: None  # slow, and nothing to a process that is killed
    for name in ("fsync", "rename", "replace", "mkdir", "open", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name), counted))
    files.exchanged = dying(files.exchanged, counted)
    manager.save()

for left in range(100):
    directory = base / str(left)
    shutil.copytree(base / "begin", directory)
    child = os.fork()
    if child == 0:
        try:
            save_and_die(directory, left)
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = pipeline(3, seed=9)
    load(directory / "minibatch-00000000", found)  # before a manager tidies up
    weight = next(found.parameters()).clone()
    assert CheckpointManager(directory, found).restore() is not None
    assert torch.equal(weight, next(found.parameters()))
    is_old = torch.equal(weight, old[0].linear.weight)
    assert is_old or torch.equal(weight, next(pipe.parameters()))
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["latest", "minibatch-00000000"], names
    print(code, "old" if is_old else "new")
    if code == 0:
        break
"""


@pytest.mark.processes
@pytest.mark.parametrize("means", ["exchange", "renames"])
def test_killed_anywhere_there_is_a_whole_checkpoint(means):
    # in memory if possible: the files of a killed process survive there too
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as d:
        run = subprocess.run(
            [sys.executable, "-c", KILLED, d, str(Path(__file__).parents[1]), means],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    lines = run.stdout.split("\n")[:-1]
    codes, kept = zip(*(line.split() for line in lines), strict=True)
    assert set(codes[:-1]) == {"9"}
    assert codes[-1] == "0"
    # the old one first, then the new one, and never back
    assert list(kept) == sorted(kept, reverse=True)
    assert len(kept) > 10
    assert kept[0] == "old"
    assert kept[-1] == "new"
