"""Memory: copies of a training's newest state in the hosts' /dev/shm, which outlive its processes.

A copy is a checkpoint, but for where its files are: a host has those of its own processes, and of
the host before it. So all are there where one host is lost; the document is on all of them.
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
_KEY = re.compile(r"[0-9a-f]{32}")  # a folder's name: nothing else is taken from another process
_IDENTITY = "memory"  # beside the checkpoints on the disk: whose copies are theirs
_LOOKING = "looking into the hosts' memory"


class Copy(NamedTuple):
    """A copy that is whole, as all hosts together have it."""

    path: Path
    sizes: dict[str, int]  # of its files
    there: list[set[str]]  # by host, which of them it has


class Memory:
    """Where copies are that follow the newest checkpoint on the disk, and belong to no other.

    Args:
        directory: of the checkpoints on the disk.
        latest: finds the newest of these, in the first process.
        peers: who keep copies together.
        usable: whether they shall.

    Attributes:
        hosts: by rank, the number of its host.
        usable: whether copies can be made; not any more after one that failed.
    """

    def __init__(
        self, directory: Path, latest: Callable[[], Path | None], peers: Peers, usable: bool
    ) -> None:
        self._directory, self._latest, self._peers = directory, latest, peers
        self._identity: str | None = None  # the first process knows it
        self._place: Path | None = None
        self.hosts: list[int] = []
        self.usable = usable

    def begin(self, name: str) -> Path | None:
        """Return where a copy is to be written; those of other trainings are gone."""
        if self.usable:
            with self._tolerated():
                place = self._meet(make=True)
                if self._first:
                    _keep_only(place, place.parent)
                return place / name
        return None

    @contextmanager
    def ending(self, copy: Path | None) -> Iterator[None]:
        """Around the writing of a copy, which may fail, or else of a checkpoint on the disk."""
        with nullcontext() if copy is None else self._tolerated():
            yield
            self.end(copy)

    def find(self) -> Copy | None:
        """Return the newest copy that is whole; every host has its document, and no other copy."""
        if self.usable:
            with self._tolerated():
                return self._find()
        return None

    def _find(self) -> Copy | None:
        place = self._meet(make=False)
        said = self._peers.settled(
            lambda: _copies(place) if self._first else {}, _LOOKING, str(place)
        )
        copy = _newest([said[ranks[0]] for ranks in members_of(self.hosts)], place)
        if copy is None:
            self.end()
            self._identity = None  # what a host that is away still has is abandoned now
            return None
        if self._first:
            here = copy.there[self.hosts[self._peers.rank]]
            _keep_only(place, place.parent)
            _keep_only(copy.path if here else None, place)

        def make() -> None:
            copy.path.mkdir(parents=True, exist_ok=True)

        self._peers.settled(make, _LOOKING, str(place))
        self.fetch(copy, [{documents.NAME}] * self._peers.size)
        return copy

    def fetch(self, copy: Copy, wanted: Sequence[Set[str]]) -> None:
        """Bring files, by rank those that it reads, to the hosts that lack them."""
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
        """Remove all copies but the newest; None: the disk has one that is newer."""
        if self._place is None or not self._first:
            return
        if newest is None:
            shutil.rmtree(self._place.parent, ignore_errors=True)
        else:
            _keep_only(newest, self._place)

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Go on without copies where one cannot be made, and say so once."""
        try:
            yield
        except CheckpointError as error:
            self.usable = False
            if self._peers.rank == 0:
                _logger.warning("no copies in the hosts' memory from here on: %s", error)

    @property
    def _first(self) -> bool:
        """Whether this process is the first one of its host."""
        rank = self._peers.rank
        return self.hosts.index(self.hosts[rank]) == rank

    def _meet(self, make: bool) -> Path:
        """Learn who is on which host, and where copies are that follow what the disk has now."""
        own = hashlib.sha256(os.fsencode(self._directory)).hexdigest()[:32]

        def mine() -> tuple[str, str]:
            return _host(_root()), self._follows(make) if self._peers.rank == 0 else ""

        found = self._peers.settled(mine, _LOOKING, str(ROOT))
        if not _KEY.fullmatch(found[0][1]):
            raise CheckpointError(f"{ROOT}: expected a key of process 0, got {found[0][1]!r}")
        names = [host for host, _ in found]
        self.hosts = [list(dict.fromkeys(names)).index(name) for name in names]
        self._place = _root() / own / found[0][1]
        return self._place

    def _follows(self, make: bool) -> str:
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
    """Return every host's ranks."""
    return [[r for r, host in enumerate(hosts) if host == h] for h in range(max(hosts) + 1)]


def to_neighbours(hosts: Sequence[int], files: Sequence[Mapping[str, int]]) -> list[Move]:
    """Have every rank's files, with their sizes, sent to the next host; none where there is one."""
    members = members_of(hosts)
    moves = []
    for rank, sizes in enumerate(files if len(members) > 1 else ()):
        following = members[(hosts[rank] + 1) % len(members)]
        target = following[members[hosts[rank]].index(rank) % len(following)]
        moves += [Move(name, size, rank, target) for name, size in sizes.items()]
    return moves


def _root() -> Path:
    """Make this user's directory; OSError where anybody else can write to it."""
    root = ROOT / f"spectrain-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    private = found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not (stat.S_ISDIR(found.st_mode) and private):
        raise PermissionError(f"{root}: expected a directory that only this user can use")
    return root


def _host(root: Path) -> str:
    """Name what has this memory: a machine, or a container with a /dev/shm of its own."""
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
    """What a host has of each copy: digest, sizes of all files, and the names of those here."""
    found: dict[str, Any] = {}
    for path in place.iterdir() if place.is_dir() else ():
        try:
            if NAME.fullmatch(path.name):
                body = documents.read(path)
                sizes = {**body["files"], documents.NAME: _size(path / documents.NAME)}
                here = [name for name, size in sizes.items() if _size(path / name) == size]
                found[path.name] = documents.digest(body), sizes, here
        except CheckpointError:  # torn
            continue
    return found


def _size(file: Path) -> int:
    """Of a plain file; -1 for anything else."""
    try:
        found = file.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _newest(said: Sequence[Mapping[str, Any]], place: Path) -> Copy | None:
    """Choose, from what every host says, among the copies that they have all files of."""
    copies: dict[tuple[int, str], Copy] = {}
    for host, every in enumerate(said):
        for name, (digest, sizes, here) in every.items():
            if not NAME.fullmatch(name):
                continue
            copy = Copy(place / name, sizes, [set() for _ in said])
            copies.setdefault((int(name[10:]), digest), copy).there[host].update(here)
    whole = [key for key, copy in copies.items() if set().union(*copy.there) == copy.sizes.keys()]
    return copies[max(whole)] if whole else None
