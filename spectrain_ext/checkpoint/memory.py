"""Keeps copies of the newest state in the machines' /dev/shm, where they survive a restart.

A copy is a checkpoint whose files are spread: each machine has those of its own processes and of
the previous machine, so no file is lost with one machine. The document is on all machines.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from spectrain_ext.distributed.exchange import Move, Peers
from spectrain_ext.errors import CheckpointError
from spectrain_ext.files import read_text, replace_file

from . import documents

_logger = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
NAME = re.compile(r"minibatch-[0-9]{8,18}")
_KEY = re.compile(r"[0-9a-f]{32}")  # the only folder names accepted from another process
_IDENTITY = "memory"  # a file in the checkpoints' directory that identifies its copies
_LOOKING = "looking into the hosts' memory"


class Copy(NamedTuple):
    """A copy of which all machines together hold every file."""

    path: Path
    sizes: dict[str, int]  # bytes by file
    there: list[set[str]]  # by machine, the files it holds


class Memory:
    """Manages the copies that belong to the newest checkpoint on disk.

    Args:
        directory: of the checkpoints on disk.
        latest: returns the newest of these, on rank 0.
        peers: the processes that keep copies together.
        usable: whether to keep copies.

    Attributes:
        hosts: by rank, the number of its machine.
        usable: whether copies are kept; False after one has failed.
    """

    def __init__(
        self, directory: Path, latest: Callable[[], Path | None], peers: Peers, usable: bool
    ) -> None:
        self._directory, self._latest, self._peers = directory, latest, peers
        self._identity: str | None = None  # on rank 0
        self._place: Path | None = None
        self.hosts: list[int] = []
        self.usable = usable

    def begin(self, name: str) -> Path | None:
        """Return the path for a new copy, and remove copies that no longer belong to training."""
        if self.usable:
            with self._disabling_on_failure():
                place = self._meet(make=True)
                if self._first:
                    _keep_only(place, place.parent)
                return place / name
        return None

    @contextmanager
    def writing(self, copy: Path | None) -> Iterator[None]:
        """Wrap the writing of a copy, which may fail, or of a checkpoint on disk (None)."""
        with nullcontext() if copy is None else self._disabling_on_failure():
            yield
            self.end(copy)

    def find(self) -> Copy | None:
        """Return the newest complete copy; afterwards machines have its document and no others."""
        if self.usable:
            with self._disabling_on_failure():
                return self._find()
        return None

    def _find(self) -> Copy | None:
        place = self._meet(make=False)
        said = self._peers.call_or_fail_together(
            lambda: _copies(place) if self._first else {}, _LOOKING, str(place)
        )
        copy = _newest([said[ranks[0]] for ranks in members_of(self.hosts)], place)
        if copy is None:
            self.end()
            self._identity = None  # abandons what a missing machine may still hold
            return None
        if self._first:
            here = copy.there[self.hosts[self._peers.rank]]
            _keep_only(place, place.parent)
            _keep_only(copy.path if here else None, place)

        def make() -> None:
            copy.path.mkdir(parents=True, exist_ok=True)

        self._peers.call_or_fail_together(make, _LOOKING, str(place))
        self.fetch(copy, [{documents.NAME}] * self._peers.size)
        return copy

    def fetch(self, copy: Copy, wanted: Sequence[Set[str]]) -> None:
        """Send each rank's ``wanted`` files to its machine where they are missing."""
        members = members_of(self.hosts)
        moves = []
        for host, ranks in enumerate(members):
            lacking = {name for r in ranks for name in wanted[r]} - copy.there[host]
            for k, name in enumerate(sorted(lacking)):
                giving = next(members[h] for h, there in enumerate(copy.there) if name in there)
                moves.append(
                    Move(name, copy.sizes[name], giving[k % len(giving)], ranks[k % len(ranks)])
                )
        self._peers.move(moves, copy.path)

    def end(self, newest: Path | None = None) -> None:
        """Remove all copies except the newest; None: all, as the disk has a newer checkpoint."""
        if self._place is None or not self._first:
            return
        if newest is None:
            shutil.rmtree(self._place.parent, ignore_errors=True)
        else:
            _keep_only(newest, self._place)

    @contextmanager
    def _disabling_on_failure(self) -> Iterator[None]:
        """Continue without copies after a failure, and log a warning once."""
        try:
            yield
        except CheckpointError as error:
            self.usable = False
            if self._peers.rank == 0:
                _logger.warning("no more copies are made in /dev/shm: %s", error)

    @property
    def _first(self) -> bool:
        rank = self._peers.rank
        return self.hosts.index(self.hosts[rank]) == rank

    def _meet(self, make: bool) -> Path:
        """Exchange machines and return the folder of copies for the disk's newest checkpoint."""
        own = hashlib.sha256(os.fsencode(self._directory)).hexdigest()[:32]

        def mine() -> tuple[str, str]:
            return _host(_root()), self._copies_name(make) if self._peers.rank == 0 else ""

        found = self._peers.call_or_fail_together(mine, _LOOKING, str(ROOT))
        if not _KEY.fullmatch(found[0][1]):
            raise CheckpointError(f"{ROOT}: expected a key of process 0, got {found[0][1]!r}")
        names = [host for host, _ in found]
        self.hosts = [list(dict.fromkeys(names)).index(name) for name in names]
        self._place = _root() / own / found[0][1]
        return self._place

    def _copies_name(self, make: bool) -> str:
        """Name copies by the training's identity and the newest checkpoint's content."""
        if make and self._identity is None:  # of a training that began here
            self._identity = secrets.token_hex(16)
            self._directory.mkdir(parents=True, exist_ok=True)
            replace_file(self._directory / _IDENTITY, self._identity.encode())
        elif not make:
            try:
                self._identity = read_text(self._directory / _IDENTITY, 100)
            except FileNotFoundError:
                self._identity = None
        latest = self._latest()
        content = b"" if latest is None else (latest / documents.NAME).read_bytes()
        identity = self._identity or secrets.token_hex(16)  # nobody's
        return hashlib.sha256(identity.encode() + content).hexdigest()[:32]


def members_of(hosts: Sequence[int]) -> list[list[int]]:
    return [[r for r, host in enumerate(hosts) if host == h] for h in range(max(hosts) + 1)]


def to_neighbours(hosts: Sequence[int], files: Sequence[Mapping[str, int]]) -> list[Move]:
    """Return moves of every rank's files to the next machine; none if there is only one."""
    members = members_of(hosts)
    moves = []
    for rank, sizes in enumerate(files if len(members) > 1 else ()):
        following = members[(hosts[rank] + 1) % len(members)]
        target = following[members[hosts[rank]].index(rank) % len(following)]
        moves += [Move(name, size, rank, target) for name, size in sizes.items()]
    return moves


def _root() -> Path:
    """Make this user's private directory; OSError if others can access it."""
    root = ROOT / f"spectrain-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    private = found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not (stat.S_ISDIR(found.st_mode) and private):
        raise PermissionError(f"{root}: expected a directory that only this user can use")
    return root


def _host(root: Path) -> str:
    """Return a name of this /dev/shm, which may belong to a machine or a container."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    found = root.stat()
    return f"{machine}-{found.st_dev}-{found.st_ino}"


def _keep_only(kept: Path | None, folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)


def _copies(place: Path) -> dict[str, Any]:
    """Return this machine's copies by name: digest, sizes of all files, names of those here."""
    found: dict[str, Any] = {}
    for path in place.iterdir() if place.is_dir() else ():
        try:
            if NAME.fullmatch(path.name):
                body = documents.read(path)
                sizes = {**body["files"], documents.NAME: _size(path / documents.NAME)}
                here = [name for name, size in sizes.items() if _size(path / name) == size]
                found[path.name] = documents.digest(body), sizes, here
        except CheckpointError:  # incomplete
            continue
    return found


def _size(file: Path) -> int:
    """Return the size of a plain file; -1 for anything else."""
    try:
        found = file.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _newest(said: Sequence[Mapping[str, Any]], place: Path) -> Copy | None:
    """Return the newest copy of which the machines together hold all files."""
    copies: dict[tuple[int, str], Copy] = {}
    for host, every in enumerate(said):
        for name, (digest, sizes, here) in every.items():
            if not NAME.fullmatch(name):
                continue
            copy = Copy(place / name, sizes, [set() for _ in said])
            copies.setdefault((int(name[10:]), digest), copy).there[host].update(here)
    whole = [key for key, copy in copies.items() if set().union(*copy.there) == copy.sizes.keys()]
    return copies[max(whole)] if whole else None
