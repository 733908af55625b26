"""Tests saves in the way of other files, of a full disk, of a kill: nothing else is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.checkpoint_cases import batches, model, pipeline, refused, same, state_of

from spectrain_ext.checkpoint import CheckpointError, CheckpointManager, load, save

DOCUMENT = "checkpoint.json"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Other files


def test_only_a_checkpoint_is_replaced_and_nothing_is_moved(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "nowhere").symlink_to("none")
    before = names(tmp_path)
    for name in ("file", "folder", "link", "nowhere"):
        with pytest.raises(FileExistsError, match=f"{name} is no checkpoint"):
            save(tmp_path / name, model(), overwrite=True)
        with pytest.raises(FileExistsError, match=f"{name} exists"):
            save(tmp_path / name, model())
    assert names(tmp_path) == before
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", model(), overwrite=True)
    load(tmp_path / "empty", model())


@pytest.mark.parametrize("content", ['{"format": "mine"}', None], ids=["json", "folder"])
def test_a_folder_with_the_name_of_a_checkpoints_file_is_none(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "c" / DOCUMENT
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    with pytest.raises(FileExistsError, match="c is no checkpoint; overwrite=True replaces only"):
        save(tmp_path / "c", model(), overwrite=True)
    assert content is None or path.read_text() == content
    assert names(tmp_path) == ["c"]


def meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something while the next save writes its files."""
    fsync, planned = os.fsync, [action]

    def fsync_and_act(file: int) -> None:
        fsync(file)
        if planned:
            planned.pop()()

    monkeypatch.setattr(os, "fsync", fsync_and_act)


@pytest.mark.parametrize(
    ("name", "moment"), [("model-00001-of-00002.safetensors", "before"), ("runs/1", "during")]
)
def test_a_checkpoint_with_something_else_is_not_replaced(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    other = saved / name

    def put_there() -> None:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")

    if moment == "before":
        put_there()
    else:
        meanwhile(monkeypatch, put_there)
    match = rf"c holds '{name.partition('/')[0]}', which is no file of the checkpoint"
    with pytest.raises((FileExistsError, CheckpointError), match=match):
        save(saved, model(), overwrite=True)
    assert other.read_text() == "mine"
    load(saved, pipeline(2))
    assert names(saved.parent) == ["c"]


def test_a_checkpoint_whose_document_cannot_be_used_is_replaced(saved: Path) -> None:
    document = saved / DOCUMENT
    os.truncate(document, document.stat().st_size - 2)
    refused(saved, r"checkpoint\.json: ")
    save(saved, model(), overwrite=True)
    load(saved, model())


def test_links_in_the_way_are_removed_and_not_followed(tmp_path: Path, saved: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("mine")
    where = tmp_path / "run"
    where.mkdir()
    for name in ("minibatch-00000000", "c"):
        (where / f".{name}.partial").symlink_to(target)
        (where / f".{name}.replaced").symlink_to(target / "precious")
    save(where / "c", model())
    manager = CheckpointManager(where, pipeline(2))
    manager.save()
    (where / ".minibatch-00000000.partial").symlink_to(target / "none")
    manager.save()
    (where / ".minibatch-00000007.replaced").symlink_to(saved)
    (where / ".minibatch-00000008.partial").symlink_to(saved)
    assert CheckpointManager(where, pipeline(2)).restore().minibatches == 0
    assert names(target) == ["precious"]
    assert (target / "precious").read_text() == "mine"
    assert not any(path.is_symlink() for path in where.iterdir())
    assert saved.is_dir()


# Writing


@pytest.mark.parametrize(
    ("path", "reason"), [("x" * 250, "File name too long"), ("file/c", "File exists")]
)
def test_a_place_where_nothing_can_be_written(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    match = f"path: {tmp_path / path} cannot be written, {reason}: {tmp_path}"
    with pytest.raises(CheckpointError, match=match):
        save(tmp_path / path, model())
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / path, model())
    assert names(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_last_one_whole(tmp_path: Path) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    manager = CheckpointManager(tmp_path, pipeline(2))
    list(manager.run(batches(3)))
    manager.save()
    expected = state_of(manager.pipe)
    list(manager.run(batches(1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises((CheckpointError, OSError), match="No space left"):
            manager.save()
    assert names(tmp_path) == ["minibatch-00000003"]
    other = CheckpointManager(tmp_path, pipeline(2, seed=3))
    assert other.restore().minibatches == 3
    same(state_of(other.pipe), expected)
    manager.save()  # there is space again
    assert names(tmp_path) == ["minibatch-00000003", "minibatch-00000004"]


KILLED = """
import os, shutil, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # before the first fork
sys.path.insert(0, sys.argv[2])
from helpers.checkpoint_cases import batches, model, pipeline, train
from spectrain_ext.checkpoint import CheckpointManager, load
base = Path(sys.argv[1])
pipe, found = pipeline(2), pipeline(2, seed=9)
train(pipe, batches(2))
CheckpointManager(base / "begin", pipe).save()
old, plain = model(seed=8), model(seed=9)
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
    load(directory / "minibatch-00000000", plain)  # before a manager tidies up
    weight = plain[0].linear.weight
    assert CheckpointManager(directory, found).restore() is not None
    assert torch.equal(weight, next(found.parameters()))
    is_old = torch.equal(weight, old[0].linear.weight)
    assert is_old or torch.equal(weight, next(pipe.parameters()))
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["minibatch-00000000"], names
    print(code, "old" if is_old else "new")
    if code == 0:
        break
"""


@pytest.mark.processes
def test_killed_anywhere_there_is_a_whole_checkpoint() -> None:
    # in memory if possible: the files of a killed process survive there too
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as d:
        command = [sys.executable, "-c", KILLED, d, str(Path(__file__).parents[1])]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    codes, kept = zip(*(line.split() for line in run.stdout.splitlines()), strict=True)
    assert set(codes[:-1]) == {"9"}
    assert codes[-1] == "0"
    # the old one first, then the new one, and never back
    assert list(kept) == sorted(kept, reverse=True)
    assert len(kept) > 10
    assert (kept[0], kept[-1]) == ("old", "new")
