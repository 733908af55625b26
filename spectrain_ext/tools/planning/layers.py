"""Measures the costs of a model's blocks, and describes links between devices."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from spectrain_ext.errors import check_number, made_of
from spectrain_ext.files import read_json, replace_file
from spectrain_ext.partitioning import BlockProfile, Profile, Tie, profile_of
from spectrain_ext.transport import Value, as_value, map_tensors, tensors_in

_LARGEST = 1 << 24  # bytes of a file
_FORMAT = 1


@dataclass(frozen=True)
class Layers:
    """The profiles of a model's blocks at two microbatch sizes; other sizes are interpolated.

    A block's seconds and bytes are a constant plus a part that grows with the samples.

    Attributes:
        samples: per microbatch in the two profiles, the smaller first.
        profiles: one for each.
        byte_seconds: seconds per byte that an optimizer step or a prediction reads or writes.
        about: the model, the device and the versions, for people.

    Example:
        >>> from spectrain_ext.partitioning import BlockProfile, Profile
        >>> from spectrain_ext.tools.planning import Layers
        >>> small, large = (Profile((BlockProfile(0.1, size, 256),)) for size in (64, 256))
        >>> Layers((1, 7), (small, large)).at(4).blocks[0].output_bytes
        160
    """

    samples: tuple[int, int]
    profiles: tuple[Profile, Profile]
    byte_seconds: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        small, large = self.samples
        for number, samples in enumerate(self.samples):
            check_number(f"samples[{number}]", samples, least=1)
        if small > large:
            raise ValueError(
                f"samples: expected two numbers, the smaller first, got {self.samples}"
            )
        a, b = (len(profile.blocks) for profile in self.profiles)
        if a != b or not a:
            raise ValueError(f"profiles: expected two of the same blocks, got {a} and {b} blocks")
        for name in ("ties", "shared"):
            for number, tie in enumerate(getattr(self.profiles[1], name)):
                if not 0 <= tie.first <= tie.last < a:
                    raise ValueError(
                        f"{name}: entry {number} is of blocks {tie.first} to {tie.last}, of {a}"
                    )
        check_number("byte_seconds", self.byte_seconds)

    def at(self, samples: float) -> Profile:
        """Return the profile for a microbatch of this many samples."""
        small, large = self.samples
        share = (samples - small) / ((large - small) or 1)

        def line(a: float, b: float) -> float:
            # Noise can make a part negative: then everything grows with the samples, or nothing.
            if small == large or a * large < b * small:
                return b * samples / large
            return b if b < a else a + share * (b - a)

        def block(index: int, a: BlockProfile, b: BlockProfile) -> BlockProfile:
            forward, backward = (
                max(0.0, line(*pair)) for pair in zip(a.parts, b.parts, strict=True)
            )
            return BlockProfile(
                forward + backward,
                round(max(0.0, line(a.output_bytes, b.output_bytes))),
                b.parameter_bytes,
                round(max(0.0, line(a.saved_bytes, b.saved_bytes))),
                b.name or str(index),
                forward,
            )

        a, b = self.profiles
        try:
            blocks = tuple(map(block, count(), a.blocks, b.blocks))
        except ValueError as error:
            raise ValueError(f"of a microbatch of {samples:g} samples: {error}") from error
        return replace(b, blocks=blocks)


def measure_layers(
    model: nn.Module | Sequence[nn.Module],
    example_input: Value,
    *,
    repeats: int = 5,
) -> Layers:
    """Measure the blocks of a model at the example's number of samples and at an eighth of it.

    Args:
        model: as for ``partition``.
        example_input: a microbatch; the first dimension of its tensors counts samples.
        repeats: timed runs of each block.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``partition``.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers
        >>> layers = measure_layers([nn.Linear(4, 4), nn.Linear(4, 2)], torch.ones(16, 4))
        >>> layers.samples, [block.parameter_bytes for block in layers.profiles[1].blocks]
        ((2, 16), [80, 40])
    """
    example_input = as_value(example_input, "example_input")
    samples = max(len(tensor) for tensor in tensors_in(example_input) if tensor.dim())
    few = min(samples, max(2, samples // 8))  # BatchNorm needs more than one
    profile = partial(profile_of, model, repeats=repeats)
    large = profile(example_input)
    small = large
    if few < samples:  # tensors of another size serve all samples
        part = map_tensors(example_input, lambda t: t[:few] if t.dim() and len(t) == samples else t)
        small = profile(part)
    parameters = sum(block.parameter_bytes for block in large.blocks)
    modules = [model] if isinstance(model, nn.Module) else model
    places = (p.device for module in modules for p in module.parameters())
    device = next(places, torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    where = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    about = {"model": type(model).__name__, **where}
    return Layers((few, samples), (small, large), _byte_seconds(parameters, device), about)


def _byte_seconds(size: int, device: torch.device) -> float:
    """Time ``a + c*b`` over the weights per byte: three streams, as for a prediction."""
    count = min(max(size // 4, 1 << 10), 1 << 24)
    a, b, out = (torch.zeros(count, device=device) for _ in range(3))

    def once() -> float:
        began = time.perf_counter()
        torch.add(a, b, alpha=0.5, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return median(once() for _ in range(9)) / (12 * count)


def write_layers(path: str | os.PathLike[str], layers: Layers) -> None:
    """Write layers to a JSON file for ``read_layers``; an existing file is replaced at the end.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers, read_layers, write_layers
        >>> layers = measure_layers([nn.Linear(4, 4), nn.Linear(4, 2)], torch.ones(16, 4))
        >>> write_layers("layers.json", layers)
        >>> read_layers("layers.json") == layers
        True
    """
    document = {
        "spectrain_profile": _FORMAT,
        "about": dict(layers.about),
        "samples": list(layers.samples),
        "byte_seconds": layers.byte_seconds,
        "ties": [asdict(tie) for tie in layers.profiles[1].ties],
        "shared": [asdict(tie) for tie in layers.profiles[1].shared],
        "profiles": [[asdict(block) for block in p.blocks] for p in layers.profiles],
    }
    replace_file(Path(path), f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode())


def read_layers(path: str | os.PathLike[str]) -> Layers:
    """Read a file that ``write_layers`` wrote.

    Raises:
        ValueError: the file, which the message names, holds something else.

    Example:
        >>> from spectrain_ext.tools.planning import measure_layers, read_layers, write_layers
        >>> write_layers("layers.json", measure_layers([nn.Linear(4, 2)], torch.ones(16, 4)))
        >>> read_layers("layers.json").about["model"]
        'list'
    """
    document = read_json(path, _LARGEST)
    refusal = f"{path}: expected a profile that spectrain plan has saved"
    if not isinstance(document, dict) or document.get("spectrain_profile") != _FORMAT:
        raise ValueError(refusal)
    try:
        ties = made_of(Tie, document["ties"], "ties")
        shared = made_of(Tie, document.get("shared", ()), "shared")  # some measured files lack them
        small, large = (
            Profile(made_of(BlockProfile, blocks, f"profiles[{number}]"), ties, shared)
            for number, blocks in enumerate(document["profiles"])
        )
        first, second = document["samples"]
        about = {str(key): value for key, value in document["about"].items()}
        return Layers((first, second), (small, large), document["byte_seconds"], about)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{refusal}: {error}") from error


@dataclass(frozen=True)
class Link:
    """A connection between two devices, in both directions at once unless ``inbound``.

    Attributes:
        name: for people.
        bandwidth: bytes per second in each direction.
        latency: seconds until the first byte of a message arrives.
        busy: seconds that a message keeps the device at either end from computing: 0 for GPUs,
            which have copy engines; for processes on CPUs the time of threads on the same cores.
        busy_bandwidth: bytes per second of the part of that time that grows with the message.
        inbound: all messages to a device share one wire, in the order in which the device asks for
            them, and a message occupies the wire for its latency too.

    Example:
        >>> from spectrain_ext.tools.planning import Link
        >>> Link("home", bandwidth=2.5e6, latency=0.02, inbound=True).seconds(5e6)
        2.02
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    busy: float = 0.0
    busy_bandwidth: float = math.inf
    inbound: bool = False

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
        """Return the seconds that a message of ``size`` bytes takes."""
        return self.latency + size / self.bandwidth

    def handling(self, size: float) -> float:
        """Return the seconds that a message keeps the device at either end from computing."""
        return self.busy + size / self.busy_bandwidth

    def all_reduce(self, size: float, devices: int) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes per device.

        A ring takes 2(r-1) steps of 1/r of the bytes each (Patarasu and Yuan, 2009); two trees
        take 2 log2(r) steps (Sanders et al., 2009). The faster one counts, as NCCL chooses; on an
        inbound wire the ring, as a tree's many small pieces would each have the latency.
        """
        if devices == 1:
            return 0.0
        ring = 2 * (devices - 1) * self.seconds(size / devices)
        trees = 2 * math.ceil(math.log2(devices)) * self.latency + 2 * size / self.bandwidth
        # Every byte is sent by one device and received by another.
        busy = 2 * 2 * (devices - 1) / devices * size / self.busy_bandwidth
        return (ring if self.inbound else min(ring, trees)) + busy


_MICROSECOND = 1e-6

#: Bandwidths are those of the standards, in one direction, after encoding and without protocols;
#: real transfers reach 75 to 90 % of them. Latencies are of the order that is usual for an NCCL
#: message over each. All are published or assumed; none is measured here.
#:
#: pcie3, pcie4: 16 lanes at 8 and 16 GT/s with 128 bits in 130 (PCI-SIG, base specifications 3.0
#: and 4.0). nvlink: NVLink 4, 18 links of 25 GB/s, as in an H100 (NVIDIA H100 data sheet: 900 GB/s
#: in both directions together). 100gbe: 100 Gb/s Ethernet (IEEE 802.3). wan200: 200 Mb/s and 50 ms
#: between devices, as in the benchmark Protocol NanoGPT (PluralisResearch/ProtocolNanoGPT, commit
#: 0551bc3): a message arrives at max(arrival of the previous one, sent) + bits/bandwidth + latency.
LINKS = {
    link.name: link
    for link in (
        Link("pcie3", 16 * 8e9 / 8 * 128 / 130, 10 * _MICROSECOND),
        Link("pcie4", 16 * 16e9 / 8 * 128 / 130, 10 * _MICROSECOND),
        Link("nvlink", 450e9, 5 * _MICROSECOND),
        Link("100gbe", 100e9 / 8, 30 * _MICROSECOND),
        Link("wan200", 200e6 / 8, 0.05, inbound=True),
    )
}


def find_link(link: str | float | Link) -> Link:
    """Return the link with this name in ``LINKS``, or of this many bytes per second.

    Raises:
        ValueError: it is neither.

    Example:
        >>> from spectrain_ext.tools.planning import find_link
        >>> find_link("nvlink").bandwidth, find_link("2.5e6").name
        (450000000000.0, '2.5e+06 bytes/s')
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
