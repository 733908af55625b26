"""Damaged, forged and half-written checkpoints: named, never executed, never in the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_cases import batches, everything, model, pipeline, same, train
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.checkpoint import CheckpointError, documents, load, save


@pytest.fixture
def saved(tmp_path):
    pipe = pipeline(2)
    train(pipe, batches(3))
    save(tmp_path / "c", pipe, minibatches=3)
    return tmp_path / "c"


def refused(directory, match):
    pipe = pipeline(2, seed=3)
    before = {key: tensor.clone() for key, tensor in everything(pipe).items()}
    with pytest.raises(CheckpointError, match=match):
        load(directory, pipe)
    same(everything(pipe), before)


def forge(directory, change):
    """Change the document and make its digest right, as somebody with bad intentions would."""
    path = directory / documents.NAME
    body = json.loads(path.read_text())["checkpoint"]
    change(body)
    path.write_bytes(documents.written(body))


def data_file(directory):
    return directory / "__0_0.distcp"


def test_missing_files(tmp_path, saved):
    refused(tmp_path / "none", r"none/checkpoint\.json: cannot be read, No such file")
    data_file(saved).unlink()
    refused(saved, r"__0_0\.distcp: cannot be read, No such file")


def test_truncated(saved):
    path = data_file(saved)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(saved, rf"__0_0\.distcp: damaged, expected {size} bytes, got {size - 1}")
    document = saved / documents.NAME
    os.truncate(document, document.stat().st_size // 2)
    refused(saved, r"checkpoint\.json: damaged, it is no checkpoint document")


def test_every_flipped_byte_of_a_tensor_is_found(saved):
    body = documents.read(saved)
    path = data_file(saved)
    content = bytearray(path.read_bytes())
    for key in ("model.0.linear.weight", "optimizer.state.3.norm.bias.momentum_buffer"):
        entry = body["tensors"][key]
        at = entry["start"] + entry["bytes"] // 2
        content[at] ^= 1
        path.write_bytes(content)
        refused(saved, rf"__0_0\.distcp: damaged, the SHA-256 of '{key}' is not what was saved")
        content[at] ^= 1


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
        (lambda b: b.update(version=2), "expected version 1, got 2"),
        (lambda b: b.update(format="other"), "expected the format .*, got 'other'"),
        (lambda b: b.update(minibatches="3"), "minibatches: expected a int, got str"),
        (lambda b: b.pop("stages"), "stages: expected a list, got NoneType"),
        (lambda b: b["stages"][0].pop("random"), r"stages\[0\]: bad or missing 'random'"),
        (lambda b: b["stages"].insert(0, 3), r"stages\[0\]: bad or missing 'stage'"),
        (lambda b: b["files"].update({"../../etc/passwd": 1}), "files: .* is no file of a ch"),
        (lambda b: next(iter(b["tensors"].values())).update(file="x"), "bad place or shape"),
        (lambda b: next(iter(b["tensors"].values())).update(shape=[-1]), "bad place or shape"),
        (lambda b: next(iter(b["tensors"].values())).update(dtype="save"), "'save' is no dtype"),
        (lambda b: b["stages"][0].update(optimizer={"groups": [3]}), "bad optimizer of stage 0"),
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


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_dcps_own_pickle_is_never_read(tmp_path, saved):
    trace = tmp_path / "executed"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(trace)))
    pipe = pipeline(2, seed=3)
    load(saved, pipe)
    assert not trace.exists()
    (saved / ".metadata").unlink()
    load(saved, pipe)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_pickle_in_place_of_a_tensor_is_refused(tmp_path, saved, zipped):
    trace = tmp_path / "executed"
    forged = tmp_path / "forged"
    if zipped:
        torch.save(Evil(trace), forged)
    else:
        forged.write_bytes(pickle.dumps(Evil(trace)))
    content = forged.read_bytes()
    data_file(saved).write_bytes(content)

    def change(body):
        body["files"][data_file(saved).name] = len(content)
        for entry in body["tensors"].values():
            entry.update(start=0, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    forge(saved, change)
    refused(saved, r"__0_0\.distcp: holds something else than tensors")
    assert not trace.exists()


def test_a_tensor_of_another_shape_than_it_says(saved):
    def change(body):
        tensors = body["tensors"]
        other = tensors["model.0.linear.bias"]
        tensors["model.0.linear.weight"].update(
            start=other["start"], bytes=other["bytes"], sha256=other["sha256"]
        )

    forge(saved, change)
    refused(saved, r"__0_0\.distcp: ")


def test_state_of_another_shape_than_its_parameter(saved):
    key = "optimizer.state.0.linear.bias.momentum_buffer"
    forge(saved, lambda body: body["tensors"][key].update(shape=[2**40]))
    refused(saved, rf"'{key}' has shape \[1099511627776\], expected \[4\]")


# Writing.


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["torch.save", "pickle.dump", "os.fsync"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_leaves_the_last_one_whole(tmp_path, saved, monkeypatch, call, asynchronous):
    from spectrain_ext.checkpoint.saving import prepare

    expected = pipeline(2, seed=5)
    load(saved, expected)
    other = pipeline(2, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises((CheckpointError, OSError), match="No space left on device"):
            if asynchronous:
                prepare(saved, other, overwrite=True).write_behind().wait()
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
from checkpoint_cases import batches, model, pipeline, train
from spectrain_ext.checkpoint import CheckpointManager, load
base = Path(sys.argv[1])
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
    assert CheckpointManager(directory, found).restore() is not None
    weight = next(found.parameters())
    is_old = torch.equal(weight, old[0].linear.weight)
    assert is_old or torch.equal(weight, next(pipe.parameters()))
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["latest", "minibatch-00000000"], names
    print(code, "old" if is_old else "new")
    if code == 0:
        break
"""


def test_killed_anywhere_there_is_a_whole_checkpoint():
    # in memory, where there is such a place: what a killed process wrote is kept there as well
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as d:
        run = subprocess.run(
            [sys.executable, "-c", KILLED, d, str(Path(__file__).parent)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    lines = run.stdout.split("\n")[:-1]
    codes, kept = zip(*(line.split() for line in lines), strict=True)
    assert set(codes[:-1]) == {"9"}
    assert codes[-1] == "0"
    # first the old one, then the new one, and no way back
    assert list(kept) == sorted(kept, reverse=True)
    assert len(kept) > 10
    assert kept[0] == "old"
    assert kept[-1] == "new"
