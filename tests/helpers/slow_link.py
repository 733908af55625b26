"""Simulates a slow link on one machine, which delays and loses packets.

It is two network namespaces with a link between them. The kernel's own tool is netem, which small
kernels omit. Here the two ends are tunnel devices and a process carries the packets: real TCP over
a real link with a delay.

Run as a program, this file is that process; it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import sys
from collections import deque
from time import monotonic
from types import TracebackType
from typing import NamedTuple

_TUNSETIFF = 0x400454CA
_TUN, _NO_PACKET_INFO = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_count = itertools.count()


class Host(NamedTuple):
    """One side of the link.

    Attributes:
        namespace: its name, for ``ip netns exec``.
        interface: its end of the link, for ``GLOO_SOCKET_IFNAME``.
        address: the address of the interface.
    """

    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Move this process there, before it starts any thread that communicates.

        Raises:
            OSError: missing permission.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            if libc.setns(handle, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
        finally:
            os.close(handle)


class SlowLink:
    """Two hosts and the link between them, inside ``with``.

    Args:
        delay: one-way delay of a packet in seconds.
        loss: share of lost packets.
        seed: seed of the losses.

    Attributes:
        hosts: the two sides.

    Raises:
        OSError: this machine or user cannot create one; the message says why.
    """

    def __init__(self, delay: float, loss: float = 0.0, seed: int = 0) -> None:
        self._arguments = [str(delay), str(loss), str(seed)]
        self._carrier: subprocess.Popen[bytes] | None = None
        name = f"st{os.getpid()}n{next(_count)}"
        self.hosts = tuple(Host(f"{name}{s}", f"{name}{s}"[-15:], f"10.213.0.{s}") for s in (1, 2))

    def __enter__(self) -> SlowLink:
        if shutil.which("ip") is None:
            raise OSError("there is no program ip (of iproute2)")
        ends: list[int] = []
        try:
            for host in self.hosts:
                _run("ip", "netns", "add", host.namespace)
                ends.append(_tunnel(host.interface))
                _run("ip", "link", "set", host.interface, "netns", host.namespace)
                self._ip(host, "addr", "add", f"{host.address}/24", "dev", host.interface)
                self._ip(host, "link", "set", "lo", "up")
                self._ip(host, "link", "set", host.interface, "up")
                # Not the machine's default, which may be BBR: it paces a sender with pauses. With a
                # delay of 20 ms, 64 KB arrived after 33 ms with BBR and after 22 ms with cubic and
                # reno; only reno is available in every namespace.
                _run("ip", "netns", "exec", host.namespace, "sh", "-c", f"echo reno > {_CONTROL}")
            command = [sys.executable, __file__, *map(str, ends), *self._arguments]
            self._carrier = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.PIPE)
        except BaseException:
            self._remove()
            raise
        finally:
            for end in ends:
                os.close(end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def set_delay(self, seconds: float) -> None:
        """Set the one-way delay of later packets, in seconds."""
        assert self._carrier is not None and self._carrier.stdin is not None
        self._carrier.stdin.write(f"{seconds}\n".encode())
        self._carrier.stdin.flush()

    def cut(self) -> None:
        """Drop all later packets without notification."""
        for host in self.hosts:
            self._ip(host, "link", "set", host.interface, "down")

    def _ip(self, host: Host, *arguments: str) -> None:
        _run("ip", "-n", host.namespace, *arguments)

    def _remove(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.communicate()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _tunnel(name: str) -> int:
    """Create a tunnel device; its file transmits in both directions."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN | _NO_PACKET_INFO))
    except OSError as error:
        os.close(end)
        raise OSError(error.errno, f"/dev/net/tun: {error.strerror}") from error
    return end


def _carry(ends: tuple[int, int], delay: float, loss: float, seed: int) -> None:
    """Forward every packet after the delay until the devices close.

    A line on standard input sets a new delay.
    """
    draw = random.Random(seed)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, int, bytes]] = deque()
    told: tuple[int, ...] = (0,)
    while True:
        wait = max(0.0, under_way[0][0] - monotonic()) if under_way else None
        readable, _, _ = select.select((*ends, *told), [], [], wait)
        for end in readable:
            if end in told:
                lines = os.read(end, 1 << 12).split()
                told, delay = (told, float(lines[-1])) if lines else ((), delay)
                continue
            try:
                packet = os.read(end, 1 << 16)
            except OSError:
                return
            if draw.random() >= loss:
                under_way.append((monotonic() + delay, other[end], packet))
        while under_way and under_way[0][0] <= monotonic():
            _, end, packet = under_way.popleft()
            try:
                os.write(end, packet)
            except OSError:  # the link is down
                continue


if __name__ == "__main__":
    one, other = int(sys.argv[1]), int(sys.argv[2])
    _carry((one, other), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
