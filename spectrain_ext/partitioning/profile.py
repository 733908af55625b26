"""Measures the time and memory of a model's blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from spectrain_ext.errors import check_number
from spectrain_ext.modules import is_valueless, modes_kept, set_mode, untouched
from spectrain_ext.rng import forked_rng
from spectrain_ext.transport.message import Value, as_value, map_tensors, refused, tensors_in

_CACHE = 4 * 2**20  # bytes, more than a core's own caches


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """The cost of one block for one microbatch."""

    seconds: float  # of one forward and backward
    output_bytes: int = 0  # of the tensors passed to the next block
    parameter_bytes: int = 0  # each parameter counted once
    saved_bytes: int = 0  # of what autograd saves for the backward, without parameters
    name: str = ""  # of the block or of its first submodule in the model, for messages
    forward_seconds: float | None = None  # None: a third of ``seconds``

    def __post_init__(self) -> None:
        for field in ("seconds", "output_bytes", "parameter_bytes", "saved_bytes"):
            check_number(field, getattr(self, field))
        if (forward := self.forward_seconds) is not None:
            check_number("forward_seconds", forward)
            if forward > self.seconds:
                most = f"all of the {self.seconds} seconds"
                raise ValueError(f"forward_seconds: expected 0 to {most}, got {forward}")

    @property
    def parts(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward."""
        forward = self.seconds / 3 if self.forward_seconds is None else self.forward_seconds
        return forward, self.seconds - forward


@dataclass(frozen=True, slots=True)
class Tie:
    """Something that two blocks share, so that they must be on one stage."""

    first: int  # index of the earlier block
    last: int
    what: str  # both places, for messages

    def __post_init__(self) -> None:
        check_number("first", self.first)
        check_number("last", self.last)


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs and ties of a model's blocks; equal profiles give equal cuts on any machine.

    Attributes:
        blocks: in the model's order.
        ties: blocks that must be on one stage.
        shared: blocks that share a parameter; if a cut separates them, their stages have one
            replica each.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> profile = st.partition(model, 2, torch.ones(4, 8), profile="parameters").profile
        >>> [block.name for block in profile.blocks]
        ['0', '1']
    """

    blocks: tuple[BlockProfile, ...]
    ties: tuple[Tie, ...] = ()
    shared: tuple[Tie, ...] = ()


def measure(blocks: Sequence[nn.Module], example_input: Value, *, repeats: int = 5) -> Profile:
    """Time the forward and backward of every block, and return the medians.

    Parameters, gradients, module buffers and random number generators are left unchanged. Blocks on
    the meta device are not run: a parameter, except of embeddings, counts as a nanosecond.

    Args:
        blocks: the model's blocks. Each runs on its own device and in its current mode.
        example_input: a microbatch for the first block, as for ``Pipeline.run``.
        repeats: timed runs of each block, after one warm-up run.

    Raises:
        TypeError: a block other than the last returns a value that stages cannot pass on.
        ValueError: ``repeats`` is below 1, or a block fails on the example; the message names it.

    Example:
        >>> profile = st.partitioning.measure([nn.Linear(8, 8), nn.ReLU()], torch.ones(4, 8))
        >>> [block.output_bytes for block in profile.blocks]
        [128, 128]
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    value = as_value(example_input, "example_input")
    if is_valueless(*blocks):
        return profile_by_parameters(blocks)
    with forked_rng(blocks):
        return Profile(tuple(_timed(blocks, value, repeats)))


def _timed(blocks: Sequence[nn.Module], value: Value, repeats: int) -> Iterator[BlockProfile]:
    for index, block in enumerate(blocks):
        last = index == len(blocks) - 1
        device = next((p.device for p in block.parameters()), None)
        if device is not None:
            value = map_tensors(value, partial(Tensor.to, device=device))
        saved: dict[int, int] = {}
        with untouched(block):
            # The first run is not timed: it counts saved bytes and warms caches.
            with _counting(block, saved):
                _, _, output = _forward_backward(block, value, index, last)
            times = [_forward_backward(block, value, index, last)[:2] for _ in range(repeats)]
        seconds = statistics.median(whole for whole, _ in times)
        forward = min(seconds, statistics.median(forward for _, forward in times))
        yield _profile(index, block, seconds, output, sum(saved.values()), forward)
        value = output


def _forward_backward(
    block: nn.Module, value: Value, index: int, last: bool
) -> tuple[float, float, Value]:
    """Return the seconds of both, the seconds of the forward, and the output."""
    batch = _entered(value, index)
    with torch.enable_grad():
        _forget(batch)
        start = time.perf_counter()
        output = _output(block, batch, index, last)
        _wait(output)
        forward = time.perf_counter() - start
        roots = [t for t in tensors_in(output) if t.requires_grad]
        gradients = [torch.ones_like(t) for t in roots]
        _forget(output)
        start = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, gradients)
        _wait(output)
        backward = time.perf_counter() - start
    return forward + backward, forward, map_tensors(output, Tensor.detach)


def _profile(
    index: int,
    block: nn.Module,
    seconds: float,
    output: Value = (),
    saved_bytes: int = 0,
    forward: float | None = None,
) -> BlockProfile:
    return BlockProfile(
        seconds,
        sum(tensor.nbytes for tensor in tensors_in(output)),
        sum(p.nbytes for p in block.parameters()),
        saved_bytes,
        f"{index}: {type(block).__name__}",
        forward,
    )


@contextmanager
def blaming_example(what: str, value: object) -> Iterator[None]:
    """Raise ValueError for an exception of a forward on the example, or on what was made of it."""
    try:
        yield
    except Exception as error:
        tensors = (f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in tensors_in(value))
        raise ValueError(
            f"example_input: {what} fails on {', '.join(tensors)}: {type(error).__name__}: {error}"
        ) from error


def _counting(block: nn.Module, saved: dict[int, int]) -> saved_tensors_hooks:
    """Record the bytes of storages that autograd saves, except parameters."""
    own = {p.untyped_storage()._cdata for p in block.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(count, lambda tensor: tensor)


def profile_by_parameters(blocks: Sequence[nn.Module]) -> Profile:
    """Return a profile with a nanosecond per parameter, without running the blocks."""
    found = []
    for index, module in enumerate(blocks):
        # An embedding looks up one row per token, which takes no time.
        tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        looked_up = {p for table in tables for p in table.parameters()}
        used = sum(p.numel() for p in module.parameters() if p not in looked_up)
        found.append(_profile(index, module, 1e-9 * used))
    return Profile(tuple(found))


def measure_on_rank_0(measure: Callable[[], Profile], blocks: Sequence[nn.Module]) -> Profile:
    """Measure, in a process group on rank 0 for all ranks, so that all cut alike."""
    if not dist.is_available() or not dist.is_initialized():
        return measure()
    failure: Exception | None = None
    profile = profile_by_parameters(blocks)
    if dist.get_rank() == 0:
        try:
            profile = measure()
        except Exception as error:  # raised after the others are notified
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
    rows = [
        (b.seconds, b.output_bytes, b.parameter_bytes, b.saved_bytes, b.parts[0])
        for b in profile.blocks
    ]
    numbers = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.broadcast(numbers, 0)
    pairs = zip(numbers.tolist(), profile.blocks, strict=True)
    return Profile(
        tuple(
            BlockProfile(seconds, int(output), int(parameters), int(saved), block.name, forward)
            for (seconds, output, parameters, saved, forward), block in pairs
        )
    )


def _entered(value: Value, index: int) -> Value:
    def entered(tensor: Tensor) -> Tensor:
        # A batch needs no gradient. Cloned, because a layer may work in place.
        leaf = tensor.detach()
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        return leaf.requires_grad_(index > 0 and differentiable).clone()

    return map_tensors(value, entered)


def _forget(value: Value) -> None:
    """Overwrite a core's caches, as the other blocks of a stage would."""
    # Repeated alone, twelve layers of 256 with 48 and 96 samples took 12 to 13 % less CPU time than
    # in a stage; with this, 3 to 5 % less.
    if any(tensor.device.type == "cpu" for tensor in tensors_in(value)):
        torch.zeros(_CACHE // 4).add_(1.0)
    _wait(value)


def written_buffers(
    model: nn.Module,  # contains all modules that ``run`` calls
    run: Callable[[Any], object],
    example: object,
    blocks: Sequence[nn.Module],  # may hold further buffers, such as constants of the code
) -> set[Tensor]:
    """Return the buffers that a forward writes to; all without values or an example that runs."""
    parts = nn.ModuleList([model, *blocks])
    buffers = set(parts.buffers())
    if example is None or is_valueless(model):
        return buffers
    try:
        value = _entered(as_value(example, "example_input"), 0)
        with modes_kept(model), untouched(parts), forked_rng([model]), torch.no_grad():
            before = {buffer: buffer.clone() for buffer in buffers}
            for training in (True, False):
                set_mode(model, training)
                run(value)
            return {buffer for buffer in buffers if not buffer.equal(before[buffer])}
    except Exception:
        return buffers


def _wait(value: Value) -> None:
    for device in {tensor.device for tensor in tensors_in(value)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _output(block: nn.Module, value: Value, index: int, last: bool) -> Value:
    """Run a block; return the value for the next one, or the tensors in the last one's output."""
    with blaming_example(f"block {index} ({type(block).__name__})", value):
        output = block(value)
    return tuple(tensors_in(output)) if last else as_value(output, f"block {index}", refused)
