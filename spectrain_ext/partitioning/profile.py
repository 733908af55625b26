"""Profile: what a cut is decided by, the time and the bytes of every block; measured or given."""

from __future__ import annotations

import reprlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spectrain_ext.rng import RNG_LOCK
from spectrain_ext.transport import Value, as_value, each, refused, tensors_in, tensors_of

from .lineage import Lineage, is_valueless

_CACHE = 4 * 2**20  # bytes: more than the caches that a core has for itself
_MOST = 10**18  # of any number in a profile: sums, products and squares of them are finite

Made = TypeVar("Made")


def check_number(name: str, value: float, least: float = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {reprlib.repr(value)}")
    if not least <= value <= _MOST:
        raise ValueError(
            f"{name}: expected a number from {least} to {_MOST:.0e}, got {reprlib.repr(value)}"
        )


def one_each(name: str, given: float | Sequence[float], count: int, of: str) -> tuple[float, ...]:
    """A positive number for each of so many; a single one that is given is everybody's."""
    found = tuple(given) if isinstance(given, Sequence) else (given,) * count
    if len(found) != count:
        raise ValueError(f"{name}: expected one per {of} ({count}), got {len(found)}")
    for number in found:
        check_number(name, number, 1 / _MOST)
    return found


def made_of(kind: Callable[..., Made], given: Sequence[Any], place: str) -> tuple[Made, ...]:
    """Made of what a file says; an error names where that is."""
    made = []
    for number, fields in enumerate(given):
        try:
            made.append(kind(**fields))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}[{number}]: {error}") from error
    return tuple(made)


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One block.

    Attributes:
        seconds: of one forward and backward.
        output_bytes: of the tensors that it hands to the next block.
        parameter_bytes: of its parameters, each counted once.
        saved_bytes: of what autograd keeps from its forward to its backward, without parameters.
        name: what the model calls it, or the first submodule in it: for messages.
        forward_seconds: of the forward alone; None: a third, as a backward takes two forwards.
    """

    seconds: float
    output_bytes: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    name: str = ""
    forward_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in ("seconds", "output_bytes", "parameter_bytes", "saved_bytes"):
            check_number(field, getattr(self, field))
        if self.forward_seconds is None:
            return
        check_number("forward_seconds", self.forward_seconds)
        if self.forward_seconds > self.seconds:
            raise ValueError(
                f"forward_seconds: expected 0 to all of the {self.seconds} seconds, got "
                f"{self.forward_seconds}"
            )

    @property
    def parts(self) -> tuple[float, float]:
        """Seconds of the forward, and of the backward."""
        forward = self.seconds / 3 if self.forward_seconds is None else self.forward_seconds
        return forward, self.seconds - forward


@dataclass(frozen=True, slots=True)
class Tie:
    """What two blocks share, so that they must be on one stage.

    Attributes:
        first: index of the earlier block.
        last: index of the later one.
        what: names both places, for messages.
    """

    first: int
    last: int
    what: str

    def __post_init__(self) -> None:
        check_number("first", self.first)
        check_number("last", self.last)


@dataclass(frozen=True, slots=True)
class Profile:
    """All that a cut depends on: the same profile gives the same cut, everywhere.

    Attributes:
        blocks: in the order of the model.
        ties: blocks that share something.
        shared: blocks that have a parameter in common, and may be cut apart: then their stages have
            one replica each.
    """

    blocks: tuple[BlockProfile, ...]
    ties: tuple[Tie, ...] = ()
    shared: tuple[Tie, ...] = ()


def measure(
    blocks: Sequence[nn.Module],
    example_input: Value,
    *,
    repeats: int = 5,
    ties: tuple[Tie, ...] = (),
) -> Profile:
    """Run every block forward and backward, and return the medians.

    Args:
        blocks: the model's blocks; each is run where its parameters are and as it is set (training
            or evaluation).
        example_input: what the first block takes, a microbatch, as ``Pipeline.run`` has inputs.
        repeats: timed runs of each block, after one that is not counted.
        ties: passed on.

    Returns:
        The profile. Parameters, gradients, module buffers and the generators of random numbers are
        as they were. Where parameters are on the meta device nothing can be timed: a block counts
        by the floating-point operations of its products and convolutions, 10^12 of them a second,
        and a backward as two forwards.

    Raises:
        TypeError: a block that returns something else than these, and is not the last.
        ValueError: ``repeats`` below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    value = as_value(example_input, "example_input")
    if is_valueless(*blocks):
        return Profile(tuple(_estimated(blocks, value)), ties)
    found: list[BlockProfile] = []
    devices = {t.device.index for b in blocks for t in b.parameters() if t.device.type == "cuda"}
    cuda = sorted(index for index in devices if index is not None)
    with RNG_LOCK, torch.random.fork_rng(devices=cuda):
        for index, block in enumerate(blocks):
            with untouched(block):
                last = index == len(blocks) - 1
                profile, value = _measured(block, value, index, last, repeats)
            found.append(profile)
    return Profile(tuple(found), ties)


def _estimated(blocks: Sequence[nn.Module], value: Value) -> Iterator[BlockProfile]:
    """Of blocks without values, what is known of a run without running it."""
    from torch.utils.flop_counter import FlopCounterMode

    lineage = Lineage(nn.ModuleList(blocks))
    value = lineage.given(value)
    with lineage.kept(), torch.enable_grad():
        for index, block in enumerate(blocks):
            saved: dict[int, int] = {}
            counter = FlopCounterMode(display=False)
            with counter, torch.autograd.graph.saved_tensors_hooks(_counting(block, saved), _as_is):
                output = _checked(block(_entered(value, index)), index, index == len(blocks) - 1)
            value = each(output, Tensor.detach)
            yield BlockProfile(
                3e-12 * counter.get_total_flops(),
                sum(tensor.nbytes for tensor in tensors_of(value)),
                sum(p.nbytes for p in block.parameters()),
                sum(saved.values()),
                f"{index}: {type(block).__name__}",
            )


def _counting(block: nn.Module, saved: dict[int, int]) -> Callable[[Tensor], Tensor]:
    """Notes the bytes of every storage that autograd keeps, but for parameters."""
    own = {p.untyped_storage()._cdata for p in block.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    return count


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def counted(blocks: Sequence[nn.Module], ties: tuple[Tie, ...] = ()) -> Profile:
    """Return a profile by numbers of parameters, a nanosecond each, without running anything."""

    def block(index: int, module: nn.Module) -> BlockProfile:
        # One row of an embedding is looked up for a token, which takes no time.
        looked_up = {
            p
            for part in module.modules()
            if isinstance(part, nn.Embedding)
            for p in part.parameters()
        }
        used = sum(p.numel() for p in module.parameters() if p not in looked_up)
        size = sum(p.nbytes for p in module.parameters())
        return BlockProfile(1e-9 * used, 0, size, 0, f"{index}: {type(module).__name__}")

    return Profile(tuple(block(index, module) for index, module in enumerate(blocks)), ties)


def agreed(measure: Callable[[], Profile], blocks: Sequence[nn.Module]) -> Profile:
    """What is measured; in a process group by rank 0, for all: times differ, and cuts must not."""
    if not dist.is_available() or not dist.is_initialized():
        return measure()
    failure: Exception | None = None
    profile = counted(blocks)
    if dist.get_rank() == 0:
        try:
            profile = measure()
        except Exception as error:  # of which the others hear
            failure = error
    kinds = [each.partition(":")[0] for each in str(dist.get_backend_config()).split(",")]
    device = "cpu" if "cpu" in kinds else kinds[0]
    counts = torch.tensor([len(blocks), -len(blocks), int(failure is not None)], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    most, least, failed = counts.tolist()
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("model: rank 0, whose cut is everybody's, could not measure it")
    if most != -least:
        raise ValueError(
            f"model: it has {len(blocks)} blocks here, and on other ranks {-least} to {most}; "
            "every rank must cut the same model"
        )
    numbers = torch.tensor(
        [
            (b.seconds, b.output_bytes, b.parameter_bytes, b.saved_bytes, b.parts[0])
            for b in profile.blocks
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.broadcast(numbers, 0)
    told = [
        BlockProfile(seconds, int(output), int(parameters), int(saved), block.name, forward)
        for (seconds, output, parameters, saved, forward), block in zip(
            numbers.tolist(), profile.blocks, strict=True
        )
    ]
    return Profile(tuple(told), profile.ties)


def _measured(
    block: nn.Module, value: Value, index: int, last: bool, repeats: int
) -> tuple[BlockProfile, Value]:
    device = next((p.device for p in block.parameters()), None)
    if device is not None:
        value = each(value, lambda tensor: tensor.to(device))
    saved: dict[int, int] = {}
    # The first run is not timed: it counts, and warms what is cached.
    with torch.autograd.graph.saved_tensors_hooks(_counting(block, saved), _as_is):
        _, _, output = _forward_backward(block, value, index, last)
    times = [_forward_backward(block, value, index, last)[:2] for _ in range(repeats)]
    seconds = statistics.median(whole for whole, _ in times)
    profile = BlockProfile(
        seconds,
        sum(tensor.nbytes for tensor in tensors_of(output)),
        sum(p.nbytes for p in block.parameters()),
        sum(saved.values()),
        f"{index}: {type(block).__name__}",
        min(seconds, statistics.median(forward for _, forward in times)),
    )
    return profile, output


def _forward_backward(
    block: nn.Module, value: Value, index: int, last: bool
) -> tuple[float, float, Value]:
    """Seconds of both and of the forward, and what it returned."""
    given = _entered(value, index)
    with torch.enable_grad():
        _forget(given)
        start = time.perf_counter()
        output = _checked(block(given), index, last)
        _wait(output)
        forward = time.perf_counter() - start
        roots = [t for t in tensors_of(output) if t.requires_grad]
        gradients = [torch.ones_like(t) for t in roots]
        _forget(output)
        start = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, gradients)
        _wait(output)
        backward = time.perf_counter() - start
    return forward + backward, forward, each(output, Tensor.detach)


def _entered(value: Value, index: int) -> Value:
    def entered(tensor: Tensor) -> Tensor:
        # Nobody asks for the gradient of the batch. A clone, because a layer may work in place.
        leaf = tensor.detach()
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        return leaf.requires_grad_(index > 0 and differentiable).clone()

    return each(value, entered)


def _forget(value: Value) -> None:
    """Let a CPU's inner caches hold something else, as when other blocks of a stage have run."""
    # Twelve layers of 256 with 48 and 96 samples, each repeated by itself, took 12 to 13 % less CPU
    # time than in a stage, and 3 to 5 % less with this.
    if any(tensor.device.type == "cpu" for tensor in tensors_of(value)):
        torch.zeros(_CACHE // 4).add_(1.0)
    _wait(value)


@contextmanager
def untouched(block: nn.Module) -> Iterator[None]:
    """Put gradients and module buffers back afterwards, and where an assignment put others."""
    gradients = [(p, p.grad) for p in block.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    owned = [(part._buffers, dict(part._buffers)) for part in block.modules()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for held, before_in in owned:
            held.clear()
            held.update(before_in)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _wait(value: Value) -> None:
    for device in {tensor.device for tensor in tensors_of(value)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _checked(output: object, index: int, last: bool) -> Value:
    """What the next block is given; of the last one's output, whatever it is, the tensors."""
    if last:
        return tuple(tensors_in(output))
    return as_value(output, f"block {index}", refused)
