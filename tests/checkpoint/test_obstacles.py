"""Tests saves in the way of other files, of a full disk, of a kill: nothing else is lost."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_cases import batches, model, pipeline, refused, same, state_of, train

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


def test_what_is_called_like_a_draft_is_its_owners(tmp_path: Path, saved: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("mine")
    where = tmp_path / "run"
    where.mkdir()
    for name in ("minibatch-00000000", "c"):
        (where / f".{name}.partial").symlink_to(target)
        (where / f".{name}.replaced").mkdir()
        (where / f".{name}.replaced" / "precious").write_text("mine")
    (where / ".minibatch-00000007.replaced").symlink_to(saved)
    before = names(where)
    save(where / "c", model())
    save(where / "c", model(), overwrite=True)
    manager = CheckpointManager(where, pipeline(2))
    for _ in range(2):
        manager.save()
    assert CheckpointManager(where, pipeline(2)).restore().minibatches == 0
    assert names(where) == sorted([*before, "c", "minibatch-00000000"])
    for path in (*where.glob(".*.replaced/precious"), target / "precious"):
        assert path.read_text() == "mine"


# Several writers of one path


@pytest.fixture(params=["exchange", "renames"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that exchanges two names, or an old one."""
    if request.param == "renames":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **more: object())
    return str(request.param)


@pytest.mark.parametrize("overwrite", [True, False])
def test_of_two_writers_the_last_one_wins_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, overwrite: bool
) -> None:
    path, found = tmp_path / "c", []
    if overwrite:
        save(path, model(8), minibatches=1)

    def other() -> None:
        save(path, model(2), minibatches=2, overwrite=overwrite)
        found.append(load(path, model()).minibatches)

    meanwhile(monkeypatch, other)
    if overwrite:
        save(path, model(3), minibatches=3, overwrite=True)
    else:
        with pytest.raises(CheckpointError, match="c exists; overwrite=True replaces it"):
            save(path, model(3), minibatches=3)
    loaded = model()
    assert [*found, load(path, loaded).minibatches] == [2, 3 if overwrite else 2]
    assert torch.equal(loaded[0].linear.weight, model(3 if overwrite else 2)[0].linear.weight)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("moment", ["document", "name"])
def test_a_reader_beside_a_writer(
    saved: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, moment: str
) -> None:
    """The checkpoint is replaced after its document was read, or between two looks at its name."""
    pipe, plain = pipeline(2, seed=5), model(seed=9)
    train(pipe, batches(2))
    real, planned = os.open, [lambda: save(saved, pipe, minibatches=7, overwrite=True)]

    def opens(path: Any, *args: Any, **more: Any) -> int:
        handle = real(path, *args, **more)
        if planned and os.path.basename(path) == DOCUMENT:
            planned.pop()()
        return handle

    if moment == "document":
        monkeypatch.setattr(os, "open", opens)
        assert load(saved, plain).minibatches == 7
    else:
        found = []
        rename = os.rename

        def renames(one: Any, other: Any) -> None:
            rename(one, other)
            found.append(load(saved, plain).minibatches)

        monkeypatch.setattr(os, "rename", renames)
        planned.pop()()
        assert found == {"exchange": [], "renames": [3, 7]}[kernel]
        load(saved, plain)
    same(dict(plain.state_dict()), dict(pipe.state_dict()))
    assert names(saved.parent) == ["c"]


def test_drafts_of_writers_that_have_ended_are_removed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, precious, stay = saved.parent, saved.parent / "precious", []
    ended = 10**9 - 1  # no process has such a number
    precious.mkdir()

    def copies() -> None:
        (draft,) = where.glob(".c.*.partial")
        host = draft.name.split(".")[2].split("-")[0]
        for number, (its_host, pid, old, stays) in enumerate(
            (
                (host, ended, False, False),
                (host, os.getppid(), False, True),
                (host, os.getppid(), True, False),
                ("0" * 8, ended, False, True),
                ("0" * 8, ended, True, False),
            )
        ):
            copied = where / f".c.{its_host}-{pid}-0000000{number}.partial"
            shutil.copytree(draft, copied)
            for path in (*copied.iterdir(), copied) if old else ():
                os.utime(path, (0, 0))
            stay.extend([copied.name] if stays else [])
        (where / f".c.{host}-{ended}-00000009.partial").symlink_to(precious)
        (where / f".c.{host}-{ended}-00000009.replaced").symlink_to(precious)
        shutil.copytree(saved, where / f".c.{host}-{ended}-00000008.replaced")

    meanwhile(monkeypatch, copies)
    save(saved, model(), minibatches=1, overwrite=True)
    shutil.rmtree(saved)
    assert load(saved, pipeline(2)).minibatches == 3  # stopped between two renames
    with pytest.raises(FileExistsError, match="c exists"):
        save(saved, model())
    save(saved, model(), minibatches=2, overwrite=True)
    assert load(saved, model()).minibatches == 2
    assert names(where) == sorted([*stay, "c", "precious"])


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
import ctypes, os, shutil, sys
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

def killed_everywhere(kernel):
    for left in range(100):
        directory = base / kernel / str(left)
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
        print(kernel, code, "old" if is_old else "new")
        if code == 0:
            break

killed_everywhere("exchange")
ctypes.CDLL = lambda *_, **more: object()  # an old kernel, which cannot exchange names
killed_everywhere("renames")
"""


@pytest.mark.processes
def test_killed_anywhere_there_is_a_whole_checkpoint() -> None:
    # in memory if possible: the files of a killed process survive there too
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as d:
        command = [sys.executable, "-c", KILLED, d, str(Path(__file__).parents[1])]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    for kernel in ("exchange", "renames"):
        codes, kept = zip(*((code, it) for one, code, it in lines if one == kernel), strict=True)
        assert set(codes[:-1]) == {"9"}
        assert codes[-1] == "0"
        # the old one first, then the new one, and never back
        assert list(kept) == sorted(kept, reverse=True)
        assert len(kept) > 10
        assert (kept[0], kept[-1]) == ("old", "new")
