"""Trains stages that several ranks share by tensor parallelism: their parameters are DTensors.

What a rank has of a DTensor is an ordinary tensor, its shard. Optimizers, versions of weights and
messages hold shards; the module alone sees DTensors, whose local tensors these are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from spectrain_ext.cutting import cut_of
from spectrain_ext.passes.offload import Saving
from spectrain_ext.pipeline.norms import gradient_norm
from spectrain_ext.pipeline.passes import Handler, Pass
from spectrain_ext.pipeline.views import ProcessesView, RunView, StageView
from spectrain_ext.schedule import Kind
from spectrain_ext.transport import Message
from spectrain_ext.weights.storage import in_a_row, local_part, taken_apart, unchanged

from .ranks import Ranks

#: Optimizers that treat each element by itself, so that a shard is updated as in the whole tensor.
_ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax Lion NAdam RAdam RMSprop Rprop SGD"
# Marks the form of a message with shards; a note of what each was comes next.
_SHARDED = "sharded"


def prepare(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Give the shards of all DTensors to optimizers and weight versions, as tensors of their own.

    Raises:
        ValueError: a DTensor that is not on this mesh, or a sum, or tied to another stage; or a
            compiled module.
    """
    owners: dict[Tensor, nn.Module] = {}
    for module in modules:
        for name, part in module.named_modules():
            if "_orig_mod" in part._modules or part._compiled_call_impl is not None:
                raise ValueError(
                    f"stage: {f'its module {name!r}' if name else 'it'} is compiled; torch.compile "
                    "cannot trace DTensors whose shards lie in one buffer, as a pipeline's do "
                    "(torch 2.13); give tensor-parallel stages uncompiled"
                )
        for name, p in module.named_parameters():
            if not isinstance(p, DTensor):
                continue
            what = f"stage: parameter {name!r}, a DTensor,"
            if p.device_mesh != mesh or isinstance(p.placements[0], Partial):
                raise ValueError(
                    f"{what} is {p.placements} on {p.device_mesh}; expected Shard or Replicate on "
                    f"the dimension 'tp' of the mesh that the pipeline got as group, {mesh}"
                )
            if name in cut_of(module).ties or owners.setdefault(p, module) is not module:
                raise ValueError(
                    f"{what} is tied to another stage; leave tied weights out of the plan of both "
                    "stages, or untie them"
                )
            # No view, as its data will be replaced.
            p._local_tensor = p._local_tensor.detach().requires_grad_(p.requires_grad)


def is_sharded(p: Tensor) -> bool:
    return isinstance(p, DTensor) and isinstance(p.placements[0], Shard)


class TensorParallel(Pass):
    """Makes shards of DTensors that leave a stage's module, and DTensors of those that enter it."""

    _over_shards: Callable[[Tensor], None]
    _ranks: Sequence[int]  # of the pipeline, that share the stage
    _trained: list[DTensor]
    _unproven: dict[str, Tensor]  # ordinary parameters whose gradients have all been zero so far
    _sharded: set[Tensor]  # shards of parameters that are not replicated

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def on(self, stage: StageView, processes: ProcessesView) -> Self:
        made = super().on(stage, processes)
        assert isinstance(processes, Ranks)
        made._over_shards, made._ranks = processes.over_shards, processes.row_of(stage.index)
        every = [p for p in stage.module.parameters() if isinstance(p, DTensor)]
        made._unproven = {
            name: p
            for name, p in stage.module.named_parameters()
            if p.requires_grad and not isinstance(p, DTensor)
        }
        made._trained = [p for p in every if p.requires_grad]
        made._sharded = {local_part(p) for p in every if is_sharded(p)}
        weights = stage.weights
        if weights is not None and made._sharded.intersection(weights.params):
            _check_optimizer(weights.optimizer, stage.index)
        return made

    # A run.

    def begin(self, run: RunView) -> Mapping[Kind, Handler]:
        self._run = run
        now = self.stage.module.named_parameters()  # a tie may have replaced some
        self._unproven = {name: p for name, p in now if name in self._unproven}
        for p in self._trained:
            p.grad = None
        return dict.fromkeys((Kind.BACKWARD, Kind.BACKWARD_WEIGHTS), self._collect)

    def _collect(self, i: int, j: int) -> None:
        """Give shards their gradients after a minibatch's last backward, and complete sums."""
        stage = self.stage
        if j < self._run.microbatches_of(i) - 1:
            return
        parts: dict[Tensor, Tensor] = {}  # of sums, by shard
        gradient: Any  # a DTensor
        with stage.computing(writes=(stage.weight_gradients,)), torch.no_grad():
            for p in self._trained:
                gradient, p.grad = p.grad, None
                if gradient is None:
                    continue
                if gradient.placements == (Partial(),) and not is_sharded(p):
                    parts[local_part(p)] = gradient.to_local()
                    continue
                gradient = gradient.redistribute(placements=p.placements)
                local_part(p).grad = gradient.to_local()
            self._compare()
            if parts:  # of norms and biases, with sequence parallelism: one collective for all
                row = in_a_row([*parts.values()])
                self._over_shards(row)
                for shard, gradient in zip(parts, taken_apart(row, [*parts]), strict=True):
                    shard.grad = gradient.to(shard.dtype)

    def _compare(self) -> None:
        """Refuse ordinary parameters whose gradients differ by rank, once each is not zero.

        All ranks see the same table, so they drop the same parameters from it, and raise together.
        """
        if not self._unproven:
            return
        table = torch.zeros(len(self._ranks), len(self._unproven), 2, dtype=torch.float64)
        for n, p in enumerate(self._unproven.values()):
            if p.grad is not None:
                table[self._mesh.get_local_rank(), n] = _signature(p.grad)
        self._over_shards(table)
        for name, of_ranks in zip([*self._unproven], table.unbind(1), strict=True):
            norms, sums = of_ranks.unbind(1)
            largest = norms.amax()
            if not (of_ranks.isfinite().all() and largest > 0):
                continue
            low, high = int(norms.argmin()), int(norms.argmax())
            # far above rounding, which a sum of many terms shows more than a norm
            if norms[high] - norms[low] <= 1e-3 * largest:
                low, high = int(sums.argmin()), int(sums.argmax())
                if sums[high] - sums[low] <= 1e-2 * largest:
                    del self._unproven[name]
                    continue
            two = ", ".join(
                f"{norms[at]:.6g} on rank {self._ranks[at]}" for at in sorted((low, high))
            )
            raise ValueError(
                f"parameter {name!r} is an ordinary tensor, and its gradient differs between the "
                f"ranks that share the stage (norms: {two}); where activations are shards, put its "
                "layer into the plan, as SequenceParallel() for a norm"
            )

    def gradient_norm(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of whole gradients: replicated ones count once."""
        of_shards = gradient_norm([p for p in params if p in self._sharded], device)
        squares = of_shards.double().square()
        self._over_shards(squares)
        of_others = gradient_norm([p for p in params if p not in self._sharded], device)
        return (squares + of_others.double().square()).sqrt().to(of_shards.dtype)

    def whole_lengths(self, params: Sequence[Tensor], lengths: Tensor) -> Tensor:
        at = [n for n, p in enumerate(params) if p in self._sharded]
        squares = lengths[..., at].square()
        self._over_shards(squares)
        lengths[..., at] = squares.sqrt()
        return lengths

    # Messages carry shards, and a note of what they are part of.

    def sends_activation(self, i: int, j: int, message: Message) -> Message:
        return _taken_apart(message)

    sends_gradient = sends_activation

    def received_activation(self, i: int, j: int, message: Message) -> Message:
        return _put_together(message, self._mesh)

    received_gradient = received_activation

    # What autograd saves of a weight is a DTensor, too.

    def saving(self, inner: AbstractContextManager[object]) -> AbstractContextManager[object]:
        return Saving(self._pack, lambda: None, inner)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Note where in its buffer a weight's shard is, as ``SavedWeights`` does for others."""
        storage = None if self.stage.weights is None else self.stage.weights.storage
        if isinstance(tensor, DTensor) and storage is not None:
            shard, spec = storage.in_bound(local_part(tensor.detach())), tensor._spec
            if shard is not None:
                return lambda: DTensor(shard(), spec, requires_grad=False)
        return partial(unchanged, tensor.detach(), tensor._version)


def _signature(gradient: Tensor) -> Tensor:
    """Return a gradient's norm, and a weighted sum that tells its sign and direction."""
    flat = gradient.detach().to_dense().double().flatten()
    weights = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device).cos()
    return torch.stack([flat.norm(), flat @ weights])


def _check_optimizer(optimizer: torch.optim.Optimizer, k: int) -> None:
    kind = type(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer has one
    ours = kind.__module__.startswith(("torch.optim", "spectrain_ext.optim"))
    if not (ours and kind.__name__ in _ELEMENTWISE.split()):
        raise ValueError(
            f"optimizer: stages[{k}] has a {kind.__name__}, and shards of weights; it may need "
            "whole matrices, or the lengths of whole tensors. Expected one that treats each "
            f"element by itself: {_ELEMENTWISE}"
        )


def _taken_apart(message: Message) -> Message:
    """Return the message with shards in the place of DTensors; one without any is unchanged."""
    if not any(isinstance(tensor, DTensor) for tensor in message.tensors):
        return message
    shards: list[Any] = [*message.tensors]
    notes: list[Any] = [None] * len(shards)
    for n, tensor in enumerate(shards):
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                if isinstance(tensor.placements[0], Partial):
                    tensor = tensor.redistribute(placements=[Replicate()])
                shards[n] = tensor.to_local()
            cut = getattr(tensor.placements[0], "dim", None)  # None: replicated
            notes[n] = cut, tensor.shape, tensor.stride()
    form = _SHARDED, json.dumps(json.dumps(notes)), message.form
    return Message(tuple(shards), message.differentiable, form)


def _put_together(message: Message, mesh: DeviceMesh) -> Message:
    if not isinstance(message.form, tuple) or message.form[:1] != (_SHARDED,):
        return message
    _, note, form = message.form
    tensors: list[Any] = [*message.tensors]
    for n, what in enumerate(json.loads(json.loads(note))):
        if what is not None and tensors[n] is not None:
            placed = [Replicate() if what[0] is None else Shard(what[0])]
            look: Any = {"shape": torch.Size(what[1]), "stride": tuple(what[2])}
            tensors[n] = DTensor.from_local(tensors[n], mesh, placed, run_check=False, **look)
    return Message(tuple(tensors), message.differentiable, form)
