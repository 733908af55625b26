"""Tests checkpoints in host memory: newer than the disk's, and only of the same training."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from helpers import memory_programs
from helpers.checkpoint_cases import batches, everything, pipeline, same
from helpers.memory_programs import MINIBATCHES
from helpers.ranks import Ranks, run_ranks

from spectrain_ext.checkpoint import CheckpointManager, load, memory, storage
from spectrain_ext.distributed.exchange import Move, Peers
from spectrain_ext.errors import CheckpointError


@pytest.fixture
def shm(tmp_path, monkeypatch):
    """Replace /dev/shm by a temporary folder."""
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(memory, "ROOT", root)
    return root


def manager_of(tmp_path, seed=0, **more):
    torch.manual_seed(4)
    settings = {"every_minibatches": 6, "memory_every": 2, **more}
    return CheckpointManager(tmp_path / "disk", pipeline(2, seed), **settings)


def train(manager, stop):
    for _ in manager.run(batches(MINIBATCHES)[manager.minibatches : stop]):
        manager.wait()  # otherwise it skips a copy while it still writes the previous one
    manager.wait()
    return manager


def copies(shm):
    return sorted(shm.glob("*/*/*/*"))


def names(paths):
    return [path.name for path in paths]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("stop", "begun"), [(1, 0), (3, 2), (5, 4), (6, 6), (7, 6), (9, 8)])
def test_stopped_between_saves_goes_on_from_memory(tmp_path, shm, stop, begun, asynchronous):
    kept = train(manager_of(tmp_path / "kept", asynchronous=asynchronous), MINIBATCHES)
    train(manager_of(tmp_path, asynchronous=asynchronous), stop)
    continued = manager_of(tmp_path, seed=5 if begun else 0, asynchronous=asynchronous)
    loaded = continued.restore()
    assert (loaded.minibatches if loaded else 0) == begun == continued.minibatches
    assert loaded is None or loaded.random
    train(continued, MINIBATCHES)
    same(everything(continued.pipe), everything(kept.pipe))
    assert names(sorted((tmp_path / "disk").iterdir())) == [
        "latest",
        "memory",
        "minibatch-00000006",
    ]


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", "", ".x"])
def test_no_name_that_another_process_says_leads_out_of_a_directory(tmp_path, name):
    directory = tmp_path / "copies" / "one"
    directory.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="no name of a file"):
        Peers(None).move([Move(name, 8, 0, 0)], directory)
    assert memory._newest([{name: ("digest", {}, [])}], directory) is None
    assert sorted(tmp_path.rglob("*")) == before


def test_a_key_of_another_process_that_is_a_path_is_not_used(tmp_path, shm, monkeypatch):
    monkeypatch.setattr(memory.Memory, "_copies_name", lambda self, make: "../../elsewhere")
    manager = CheckpointManager(tmp_path / "checkpoints", pipeline(2), memory_every=1)
    assert manager.restore() is None
    assert not manager._memory.usable


def test_the_newest_copy_stays_until_the_disk_has_one(tmp_path, shm):
    manager = manager_of(tmp_path)
    for stop, expected in ((2, "00000002"), (5, "00000004")):
        train(manager, stop)
        assert names(copies(shm)) == [f"minibatch-{expected}"]
    assert manager.latest() is None
    assert (shm.glob("*").__next__().stat().st_mode & 0o777) == 0o700
    train(manager, 6)
    assert copies(shm) == []
    train(manager, 8)
    manager.save()  # as at the end of a training
    assert copies(shm) == []


def test_copies_are_drained_for_even_if_there_are_none(tmp_path, shm):
    """A training therefore has the same bits whether its copies succeed or not."""
    kept = train(manager_of(tmp_path / "kept"), MINIBATCHES)
    shutil.rmtree(shm)
    without = train(manager_of(tmp_path), MINIBATCHES)
    same(everything(without.pipe), everything(kept.pipe))


# Copies of other or abandoned trainings


def test_a_deleted_directory_takes_its_copies_along(tmp_path, shm):
    train(manager_of(tmp_path), 5)
    shutil.rmtree(tmp_path / "disk")
    assert manager_of(tmp_path).restore() is None
    assert copies(shm) == []


@pytest.mark.parametrize("looks", [False, True])
def test_a_training_that_began_anew_does_not_know_the_copies_of_the_last_one(tmp_path, shm, looks):
    train(manager_of(tmp_path), 5)
    old = shm.rename(tmp_path / "old")
    shm.mkdir()
    manager = manager_of(tmp_path, seed=3)
    if looks:
        assert manager.restore() is None
    train(manager, 3)
    assert names(copies(shm)) == ["minibatch-00000002"]
    shutil.rmtree(shm)
    old.rename(shm)  # like a host that was away in between
    assert manager_of(tmp_path).restore() is None
    assert copies(shm) == []


def test_copies_follow_the_checkpoint_on_the_disk_and_no_other(tmp_path, shm):
    train(manager_of(tmp_path, every_minibatches=4, memory_every=1), 4)
    pointer = (tmp_path / "disk" / "latest").read_text()
    train(manager_of(tmp_path, every_minibatches=4, memory_every=1), 4)  # the same name again
    other = manager_of(tmp_path, every_minibatches=3, memory_every=1)
    assert other.restore().minibatches == 4
    train(other, 8)
    assert names(copies(shm)) == ["minibatch-00000008"]
    (tmp_path / "disk" / "latest").write_text(pointer)  # back to the older one, by hand
    assert manager_of(tmp_path).restore().minibatches == 4
    assert copies(shm) == []


def test_a_checkpoint_saved_without_copies_is_not_followed_by_those_of_before(tmp_path, shm):
    train(manager_of(tmp_path, every_minibatches=2, memory_every=3), 3)
    assert names(copies(shm)) == ["minibatch-00000003"]
    plain = manager_of(tmp_path, seed=3, every_minibatches=2, memory_every=None)
    train(plain, 2)  # another training, with a checkpoint of the same name
    restored = manager_of(tmp_path, seed=5)
    assert restored.restore().minibatches == 2
    same(everything(restored.pipe), everything(plain.pipe))


def test_an_older_checkpoint_loaded_by_its_path_begins_another_training(tmp_path, shm):
    train(manager_of(tmp_path, every_minibatches=3), 5)
    assert names(copies(shm)) == ["minibatch-00000004"]
    again = manager_of(tmp_path)
    load(tmp_path / "disk" / "minibatch-00000003", again.pipe)
    for _ in again.run(batches(2, seed=7)):
        pass
    assert names(copies(shm)) == ["minibatch-00000002"]
    restored = manager_of(tmp_path, seed=5)
    assert restored.restore().minibatches == 2
    same(everything(restored.pipe), everything(again.pipe))


# Incomplete and damaged copies, full memory


def spoil(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["missing", "cut", "document", "partial", "link"])
def test_a_torn_copy_is_never_loaded(tmp_path, shm, damage):
    manager = train(manager_of(tmp_path, every_minibatches=3), 5)
    (copy,) = copies(shm)
    file = copy / "state.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "document":
        (copy / "checkpoint.json").unlink()
    elif damage == "partial":
        copy.rename(copy.with_name(f".{copy.name}.partial"))
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    restored = manager_of(tmp_path, seed=5)
    assert restored.restore().minibatches == 3
    assert copies(shm) == []
    train(restored, 5)
    same(everything(restored.pipe), everything(manager.pipe))


def test_of_two_copies_the_older_one_is_loaded_if_the_newer_one_is_torn(tmp_path, shm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(memory.Memory, "end", lambda *_: None)
        train(manager_of(tmp_path), 5)
    older, newer = copies(shm)
    assert names([older, newer]) == ["minibatch-00000002", "minibatch-00000004"]
    (newer / "model.safetensors").unlink()
    assert manager_of(tmp_path, seed=5).restore().minibatches == 2
    assert copies(shm) == [older]


def test_a_damaged_copy_is_left_aside_with_a_warning(tmp_path, shm, caplog):
    train(manager_of(tmp_path, every_minibatches=3), 5)
    (copy,) = copies(shm)
    file = copy / "model.safetensors"
    spoil(file)
    assert manager_of(tmp_path, seed=5).restore().minibatches == 3
    (record,) = caplog.records
    assert "the copy in /dev/shm cannot be used: " in record.message
    assert "model.safetensors: damaged, the SHA-256 of" in record.message
    assert copies(shm) == []


def test_a_damaged_copy_without_a_checkpoint_is_an_error(tmp_path, shm):
    train(manager_of(tmp_path), 5)
    (copy,) = copies(shm)
    body = json.loads((copy / "checkpoint.json").read_text())
    file = copy / "model.safetensors"
    spoil(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged, the SHA-256"):
        manager_of(tmp_path, seed=5).restore()
    assert body["checkpoint"]["minibatches"] == 4


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_no_room_is_a_warning_and_training_goes_on(
    tmp_path, shm, caplog, monkeypatch, asynchronous
):
    kept = train(manager_of(tmp_path / "kept"), MINIBATCHES)
    real, before = storage.save_file, copies(shm)

    def full(content, file, **more):
        if shm in file.parents:
            raise OSError(28, "No space left on device")
        real(content, file, **more)

    monkeypatch.setattr(storage, "save_file", full)
    manager = train(manager_of(tmp_path, asynchronous=asynchronous), MINIBATCHES)
    (record,) = caplog.records
    assert "no more copies are made in /dev/shm: " in record.message
    assert "No space left on device" in record.message
    same(everything(manager.pipe), everything(kept.pipe))
    assert names((tmp_path / "disk").glob("minibatch*")) == ["minibatch-00000006"]
    assert copies(shm) == before


@pytest.mark.parametrize("kind", ["open", "other", "link", "file", "none"])
def test_a_directory_that_is_not_private_is_not_used(tmp_path, shm, caplog, kind):
    train(manager_of(tmp_path), 3)
    (own,) = shm.iterdir()
    if kind == "open":
        own.chmod(0o755)
    elif kind == "other":
        if os.getuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(own, 1, -1)
    elif kind == "link":
        own.rename(tmp_path / "elsewhere")
        own.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.rmtree(own)
        if kind == "file":
            own.write_text("")
        else:
            shm.rmdir()
    manager = manager_of(tmp_path)
    assert manager.restore() is None
    train(manager, 6)
    (record,) = caplog.records
    assert "no more copies are made in /dev/shm: " in record.message
    assert manager.latest().name == "minibatch-00000006"


# Several hosts


def never_stopped(tmp_path, ranks, **more):
    torch.manual_seed(4)
    settings = {"memory_every": 2, **more}
    manager = CheckpointManager(tmp_path / "one", pipeline(ranks), **settings)
    return everything(train(manager, MINIBATCHES).pipe)


def restarted(tmp_path, hosts, more, stop=MINIBATCHES):
    """Return where the ranks resumed, and their state."""
    found = run_ranks(memory_programs.trains, len(hosts), str(tmp_path), hosts, stop, more)
    (begun,) = {begun for begun, _ in found}
    return begun, {key: value for _, own in found for key, value in own.items()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "lost", "more"),
    [
        ([0, 0], [], {}),
        ([0, 1], [1], {"asynchronous": True}),
        ([0, 1], [0], {}),
        ([0, 0, 1], [1], {}),
        ([0, 0, 1], [0], {"asynchronous": True}),
        ([0, 1, 2], [2], {"every_minibatches": 3}),
        ([0, 1, 2, 3], [0, 2], {}),
    ],
    ids=str,
)
def test_a_lost_host_takes_what_its_neighbour_has(tmp_path, shm, hosts, lost, more):
    expected = never_stopped(tmp_path, len(hosts), **more)
    assert restarted(tmp_path, hosts, more, stop=5)[0] == 0
    for host in lost:
        shutil.rmtree(tmp_path / f"host{host}")
    begun, state = restarted(tmp_path, hosts, more)
    assert begun == 4
    same(state, expected)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("culprit", "calls"), [(0, 5), (1, 24), (0, 42), (0, 48), (1, 48), (1, 50)], ids=str
)
def test_killed_in_the_middle_of_a_copy_goes_on_from_this_one_or_the_last(
    tmp_path, shm, culprit, calls
):
    expected = never_stopped(tmp_path, 2)
    arguments = (str(tmp_path), [0, 1], MINIBATCHES, {"timeout": 10.0}, (culprit, calls))
    ends = Ranks(memory_programs.trains, 2, *arguments).join()
    assert ends[culprit].code == -signal.SIGKILL
    assert ends[1 - culprit].code == 1
    begun, state = restarted(tmp_path, [0, 1], {})
    assert begun in (2, 4)
    same(state, expected)


@pytest.mark.processes
def test_a_host_has_its_own_files_and_those_of_the_host_before(tmp_path):
    hosts = [0, 1, 1, 2]
    restarted(tmp_path, hosts, {}, stop=5)
    for host, before in ((0, 2), (1, 0), (2, 1)):
        found = {path.name for path in (tmp_path / f"host{host}").rglob("*.safetensors")}
        owners = [r for r in range(4) if hosts[r] in (host, before)]
        assert found == {
            f"{kind}-{r + 1:05d}-of-00004.safetensors"
            for kind in ("model", "state")
            for r in owners
        }


@pytest.mark.processes
@pytest.mark.parametrize("on_disk", [True, False])
def test_more_lost_hosts_than_neighbours_go_back_to_the_disk(tmp_path, shm, on_disk):
    more = {"every_minibatches": 3} if on_disk else {}
    expected = never_stopped(tmp_path, 3, **more)
    restarted(tmp_path, [0, 1, 2], more, stop=5)
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host{host}")
    begun, state = restarted(tmp_path, [0, 1, 2], more)
    assert begun == (3 if on_disk else 0)
    same(state, expected)


@pytest.mark.processes
def test_what_is_damaged_on_one_host_is_left_aside_by_all(tmp_path, shm):
    more = {"every_minibatches": 3}
    expected = never_stopped(tmp_path, 2, **more)
    restarted(tmp_path, [0, 1], more, stop=5)
    (file,) = (tmp_path / "host0").rglob("model-00001-of-00002.safetensors")
    spoil(file)
    begun, state = restarted(tmp_path, [0, 1], more)
    assert begun == 3
    same(state, expected)


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [[0], [0, 1], [3, 4, 0, 1]], ids=str)
def test_other_numbers_of_processes_and_hosts_go_on_as_from_the_disk(tmp_path, hosts):
    restarted(tmp_path, [0, 1, 1], {}, stop=5)
    same_on_disk = tmp_path / "other" / "disk" / "minibatch-00000004"
    for host in range(2):
        (copy,) = (tmp_path / f"host{host}").rglob(same_on_disk.name)
        shutil.copytree(copy, same_on_disk, dirs_exist_ok=True)
    begun, expected = restarted(tmp_path / "other", hosts, {})
    assert begun == 4
    begun, state = restarted(tmp_path, hosts, {})
    assert begun == 4
    same(state, expected)
