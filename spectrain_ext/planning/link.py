"""Link: what connects two devices, by name or by its bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection of two devices; both directions at once.

    Attributes:
        name: what it is called.
        bandwidth: bytes per second in each direction.
        latency: seconds until the first byte of a message arrives.
        busy: seconds that a message keeps the device at either end from computing. GPUs have
            engines for that; of processes on a CPU it is the time of threads on the same cores.
        busy_bandwidth: bytes per second of the part of that which grows with the message.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    busy: float = 0.0
    busy_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth: expected a positive number, got {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency: expected a number of at least 0, got {self.latency}")
        if not (0 <= self.busy < math.inf and self.busy_bandwidth > 0):
            raise ValueError(
                f"busy: expected a time and a bandwidth, got {self.busy}, {self.busy_bandwidth}"
            )

    def seconds(self, size: float) -> float:
        """Of a message of so many bytes."""
        return self.latency + size / self.bandwidth

    def handling(self, size: float) -> float:
        """Seconds that a message of so many bytes keeps the device at either end busy."""
        return self.busy + size / self.busy_bandwidth

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds to sum so many bytes of each device, and have the sum on all.

        By a ring, in 2(r-1) steps with a share of 1/r each (Patarasu and Yuan, 2009), or, where
        its latency is less, by two trees, 2 log2(r) steps deep (Sanders et al., 2009), as NCCL
        chooses.
        """
        if devices == 1:
            return 0.0
        ring = 2 * (devices - 1) * self.seconds(size / devices)
        trees = 2 * math.ceil(math.log2(devices)) * self.latency + 2 * size / self.bandwidth
        # Every byte is sent by one device and received by another.
        busy = 2 * 2 * (devices - 1) / devices * size / self.busy_bandwidth
        return min(ring, trees) + busy


_MICROSECOND = 1e-6

#: Bandwidths are those of the standards in one direction, after encoding, without protocols; real
#: transfers reach 75 to 90 % of them. Latencies are of the order that is usual for a message of
#: NCCL over each. All of it is published or assumed, nothing is measured here.
#:
#: pcie3, pcie4: 16 lanes at 8 and 16 GT/s with 128 bits in 130 (PCI-SIG, base specifications 3.0
#: and 4.0). nvlink: NVLink 4, 18 links of 25 GB/s, as an H100 has (NVIDIA H100 data sheet: 900 GB/s
#: both directions together). 100gbe: 100 Gb/s Ethernet (IEEE 802.3).
LINKS = {
    link.name: link
    for link in (
        Link("pcie3", 16 * 8e9 / 8 * 128 / 130, 10 * _MICROSECOND),
        Link("pcie4", 16 * 16e9 / 8 * 128 / 130, 10 * _MICROSECOND),
        Link("nvlink", 450e9, 5 * _MICROSECOND),
        Link("100gbe", 100e9 / 8, 30 * _MICROSECOND),
    )
}


def find_link(link: str | float | Link) -> Link:
    """The link of that name, or of so many bytes per second.

    Raises:
        ValueError: there is none of that name, or a bandwidth that is not positive.
    """
    if isinstance(link, Link):
        return link
    if isinstance(link, str) and link in LINKS:
        return LINKS[link]
    try:
        bandwidth = float(link)
    except ValueError:
        raise ValueError(
            f"link: expected {', '.join(LINKS)} or bytes per second, got {link!r}"
        ) from None
    return Link(f"{bandwidth:g} bytes/s", bandwidth)
