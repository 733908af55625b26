"""DistributedPipeline: one process's stages of a pipeline over a process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from spectrain_ext.method import Method, find_method
from spectrain_ext.operators.averaging import Averaging
from spectrain_ext.pipeline.activations import Offload, Recompute
from spectrain_ext.pipeline.averaging import check_averaged
from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.loads import OnNonfinite
from spectrain_ext.pipeline.loops import minibatches, share_of
from spectrain_ext.pipeline.losses import Keep, Result
from spectrain_ext.pipeline.observer import Observer
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.schedule import Replicas

from .board import Board
from .connections import RankConnections
from .exchange import Peers
from .whole import write_back

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from spectrain_ext.codecs import Codec
    from spectrain_ext.method import Window

_made: Counter[tuple[int, ...]] = Counter()


class DistributedPipeline(Pipeline):
    """The stages of one process in a pipeline over processes, under ``torchrun`` or any launcher.

    As many processes as stages; or fewer, with as many stages each; or several for a stage: its
    replicas, between which the microbatches of every minibatch are dealt out, and whose gradients
    are added up for an update.

    Every rank makes one, with its own stages and otherwise the same arguments, and calls the same
    methods in the same order. What it computes is what ``Pipeline`` computes in one process, to the
    bit on a CPU with as many threads, if all ranks start from the same ``torch.manual_seed``; with
    replicas up to the order of sums, and with the versions that each replica reads.

    Weights that stages have in common (see ``Pipeline``) are known to those that ``partition`` and
    ``cut_at`` have made; others say so by ``tied_parameters``, on the later stage's rank. None of
    these stages can have replicas. After every run the copies are the first stage's true weights;
    in the middle of one they are what the last forward had, and after a failure what had arrived.

    Args:
        stage: the part of the model that belongs to this rank: stage k of N on rank k of N, or on
            each of the stage's replicas. Or several, ``stages[rank::ranks]`` of all: rank r of R
            has the stages r, r + R, r + 2R, ... as many as every other, and no replicas.
        optimizer, method, scheduler, microbatches: as for ``Pipeline``.
        loss_fn: likewise; called on the last stage's ranks.
        count: likewise; called on rank 0, and not with ``averaging``, where every replica has a
            minibatch of its own.
        window: likewise; windows count the microbatches of one replica.
        clip_norm, clip_scope: likewise; a global norm makes the hosts wait for one another. With
            ``averaging`` every replica has a gradient of its own, and ``"auto"`` is by stage.
        master_dtype, recompute, split_dim, on_nonfinite, offload, codec: likewise.
        replicas: ranks of each stage, one number for all or one per stage; None: one. Ranks are
            numbered stage by stage, replica by replica, and replica c of r runs microbatches c, c +
            r, c + 2r, ... of every minibatch: r divides ``microbatches``. Replicas must start from
            the same weights, which is checked once, here; module buffers are each one's own.
        averaging: one of ``spectrain_ext.averaging``, with the same number of replicas of all
            stages: replica c of every stage makes up a pipeline of its own, which updates by the
            gradients of its own microbatches alone, a minibatch to it, and whose results have the
            losses of these; its weights are averaged with the other replicas' at every update. See
            ``averaged``. None: gradients are added up.
        group: all ranks, stage by stage; None: the default group.
        device: where the stage is moved; None: where it is. Either all ranks have the CPU (messages
            go by gloo) or all have a CUDA device: messages go by NCCL if each has one of its own,
            otherwise by gloo through host memory.
        timeout: seconds that a rank waits for another, to make its pipeline (15 at least) or in a
            run, before all end with a ``RankError``.
        dynamic_shapes: whether later messages may be larger than the first. Smaller ones, such as
            an uneven last minibatch, need no permission.
        share_loss: whether every rank gets the losses, as float64; on CUDA that makes the last
            rank's host wait for every loss.

    Attributes:
        rank: this process's rank in the group.
        ranks: their number.
        timeout: as given.
        replicas: the number of ranks of every stage.
        replica: which of its stage's this process is, counted from 0.

    Raises:
        ValueError: besides Pipeline's reasons, an argument that another rank has differently.
        RankError: another rank could not make its part, or has not come to it in time.

    ``state_dict`` has the stage's part of what ``Pipeline`` has, under the same names;
    ``load_state_dict`` takes this stage's out of a whole model's.
    """

    _connections: RankConnections

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: Callable[..., Tensor],
        method: str | Method = "auto",
        *,
        replicas: int | Sequence[int] | None = None,
        averaging: Averaging | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        microbatches: int | Literal["auto"] = "auto",
        window: Window = None,
        clip_norm: float | None = None,
        clip_scope: Literal["auto", "stage", "global"] = "auto",
        master_dtype: torch.dtype | None = None,
        recompute: Recompute = False,
        timeout: float = 300.0,
        dynamic_shapes: bool = False,
        share_loss: bool = False,
        split_dim: SplitDim = 0,
        count: Callable[[Any], float | Tensor] | None = None,
        on_nonfinite: OnNonfinite = None,
        offload: Offload = None,
        codec: Codec | tuple[Codec | None, Codec | None] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "DistributedPipeline: there is no process group; call "
                "torch.distributed.init_process_group first"
            )
        if not timeout > 0:
            raise ValueError(f"timeout: expected a positive number of seconds, got {timeout}")
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) != dist.get_world_size():
            raise ValueError(
                f"group: expected all {dist.get_world_size()} ranks of the default group, got "
                f"{len(members)}"
            )
        self.rank = dist.get_rank(group)
        self.ranks = len(members)
        self.timeout = timeout
        self._group = group
        self._averages = averaging is not None
        # All ranks make their pipelines in one order: the count names this one.
        prefix = f"spectrain_ext/{'-'.join(map(str, members))}/{_made[members]}"
        _made[members] += 1
        store = PrefixStore(prefix, _get_default_store())
        self._board = board = Board(store, self.rank, self.ranks, timeout)
        with board.run(starts=True):
            modules = [stage] if isinstance(stage, nn.Module) else list(stage)
            all_replicas = _replicas_of(len(modules), replicas, self.ranks)
            if averaging is not None:
                _check_averaging(all_replicas, clip_scope)
                if count is not None:
                    raise ValueError(
                        "count: with averaging every replica has a minibatch of its own; have "
                        "loss_fn return a pair (sum, count)"
                    )
                check_averaged(find_method(method))
                clip_scope = "stage"
            self._connections = around = RankConnections(
                *(group, board, all_replicas, dynamic_shapes, share_loss),
                *(clip_norm, clip_scope, averaging, split_dim),
            )
            self.replicas, self.replica = all_replicas.counts, around.replica
            devices = None if device is None else [device] * len(modules)
            super().__init__(
                *(modules, optimizer, loss_fn, method, devices, scheduler, microbatches, window),
                *(clip_norm, clip_scope, master_dtype, recompute, split_dim, count, on_nonfinite),
                *(offload, codec),
            )

    def run(
        self,
        batches: Iterable[object] | None = None,
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
    ) -> Iterator[Result]:
        """Train on every batch; every rank calls it, and every rank yields every minibatch.

        Args:
            batches: as for ``Pipeline``, on rank 0: whole minibatches, of which it sends inputs to
                the other replicas of stage 0 and targets to the last stage. Of a batch that is a
                mapping both are all of it. What is no tensor is None, a bool, a number or a string:
                nothing else goes to another process. Other ranks need none, and ignore them.
            trace: records when this rank's actions run, or measures them.
            keep: as for ``Pipeline``; results carry it on the ranks of the last stage, with
                replicas there each that of its own microbatches. It is shared with nobody.

        Yields:
            On the last rank a ``Result`` per minibatch as soon as its loss has been issued, or with
            replicas of the last stage after its update there; on others after this stage's update,
            and asking it for the loss raises RuntimeError unless losses are shared. Leaving the
            loop on rank 0 ends the run of all ranks; on any other the rest of the run is trained on
            within ``close()``.

        Raises:
            RankError: another rank has failed, or one has let this one wait for too long. Every
                rank ends, with the same first cause, and names the same report. A rank that is
                stuck is ended by its own watchdog, which says so on stderr, with exit code 1.
            ValueError: rank 0 has no batches; or its loader gives every process a part of the
                samples, which names its sampler.
            StageError and others, as for ``Pipeline``: on the rank that has failed.

        After a failure the pipeline cannot run again.
        """
        return super().run(self._fed(batches), trace=trace, keep=keep)

    def _fed(self, batches: Iterable[object] | None) -> Iterable[object]:
        if self.rank:
            return ()
        if batches is None:
            raise ValueError("batches: rank 0 needs them, got None")
        share = share_of(batches) if self.ranks > 1 else None
        if share is not None:
            raise ValueError(_needs_all(*share))
        return batches

    def _tell(self, make: Callable[[], Any], doing: str) -> list[Any]:
        with self.together(doing):
            hosts = self._connections.all_ranks().host
            self._board.doing(doing)
            return Peers(hosts, self._board).gathered(make, doing)

    def write_back(self, model: nn.Module | None) -> None:
        """Write the true weights of all stages into the uncut model, on the ranks that want them.

        Every rank calls it between two runs. Tensors travel one at a time, by the hosts: those that
        train, and of others those that a model has otherwise. Each stage's are those of its first
        replica. What a rank's model shares with its own stage stays as it is. With ``averaging``
        call it, and use the model, inside ``averaged``.

        Args:
            model: as for ``Pipeline``; or None, on a rank that wants nothing.

        Raises:
            RuntimeError: a run has not ended, or an earlier one failed.
            TypeError, ValueError: as for ``Pipeline``, where the model is; RuntimeError on others.
                Nothing has been written then.
            RankError: another rank has failed: some tensors may have been written and others not.
        """
        what = "writing the weights back"
        with self._executor.callers_turn(), self.together(what), torch.no_grad():
            hosts = self._connections.all_ranks().host
            self._board.doing(what)
            own = self.state_dict(keep_vars=True)
            write_back({} if self.replica else own, own, model, Peers(hosts, self._board))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, between two runs, the parameters are what ``averaging`` makes of all replicas.

        They are the centre of ``Elastic``, the mean over replicas of ``Sparse``; then again this
        replica's own. Without averaging nothing changes. Every rank enters it; ``evaluate`` and
        calling the pipeline do it by themselves, while ``state_dict`` has the replica's own weights
        unless it is called inside.

        Raises:
            RuntimeError: a run has not ended, or an earlier one failed.
            RankError: another rank has failed.
        """
        around = self._executor.connections
        with ExitStack() as held, self._executor.callers_turn():
            what = "averaging the replicas"
            with self.together(what), self.busy(what):
                found = [(each, each.average()()) for each in around.averaged.values()]
            for each, values in found:
                held.enter_context(each.holding(values))
            yield

    def _forward_all(self, *given: Any, **more: Any) -> None:
        with self.averaged() if self._averages else nullcontext():
            super()._forward_all(*given, **more)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Inside, all ranks do something together between two runs, and watch each other.

        As a run does, this ends all ranks with one report where one fails or keeps the others
        waiting; checkpoints use it. All ranks enter it, in the same order.

        Raises:
            RankError: on leaving: another rank has gone, or let this one wait for too long.
            RuntimeError: a run has not ended, or an earlier one failed.
        """
        self.check_drained(what)
        return self._board.together(what)

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Inside, within ``together``, this rank says what the others wait for."""
        return self._board.busy(what)

    def forward(self, value: Any = None) -> Any:
        """The output of the true weights for one batch, through the stages of all ranks.

        Every rank calls it, in whatever mode its stage is, and without a graph.

        Args:
            value: the input, on rank 0; others need none.

        Returns:
            The output on the ranks of the last stage, None on all others.

        Raises:
            RuntimeError: a run has not ended yet, or an earlier one failed.
            ValueError: there is no input.
            RankError, StageError: as for ``run``.
        """
        self.check_drained("calling the pipeline")
        nothing = torch.zeros(1)
        last = self.places[-1].stage == len(self.replicas) - 1
        if self.rank == 0 and value is None:
            raise ValueError("value: rank 0 needs the input, got None")
        batch = (nothing if self.rank else value, nothing)
        outputs: list[Any] = []
        all_replicas = self._connections.replicas
        # Replicas deal batches out: each gets this one.
        batches = minibatches([batch] * lcm(*all_replicas.counts), all_replicas, alone=False)
        self._forward_all(batches, lambda output, _: outputs.append(output), evaluates=False)
        return outputs[0] if last else None


def _replicas_of(stages: int, replicas: int | Sequence[int] | None, ranks: int) -> Replicas:
    """Who has which stage, where every rank has so many."""
    if stages < 2:
        return Replicas.of(replicas, ranks)
    if ranks == 1:
        raise ValueError(
            f"stage: got {stages} for the only rank; Pipeline takes all in one process"
        )
    if replicas not in (None, 1):
        raise ValueError(
            f"replicas: with {stages} stages on every rank expected one of each, got {replicas}"
        )
    return Replicas((1,) * (stages * ranks), ranks)


def _needs_all(what: str, name: str, count: int) -> str:
    remedy = "give it num_replicas=1 and rank=0"
    if name != "num_replicas":
        remedy = "give the loader that Accelerate has not prepared"
    return (
        f"batches: a {what} with {name}={count} gives this process a part of the samples, and "
        "nobody would take the rest, as rank 0 has the only loader of a pipeline, and deals "
        f"microbatches out to replicas; {remedy}"
    )


def _check_averaging(replicas: Replicas, clip_scope: str) -> None:
    if len(set(replicas.counts)) > 1 or replicas.counts[0] == 1:
        raise ValueError(
            "averaging: needs the same number of replicas of every stage, at least 2, got "
            f"{list(replicas.counts)}"
        )
    if clip_scope == "global":
        raise ValueError(
            "averaging: clip_scope='global' is a norm of one gradient, and every replica has its "
            "own; expected clip_scope='stage'"
        )
