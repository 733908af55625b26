"""Trains one process's stages of a pipeline that spans a process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import lcm
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from spectrain_ext.cutting import cut_of
from spectrain_ext.method import Method, find_method
from spectrain_ext.peers import Peers
from spectrain_ext.pipeline.batch import SplitDim
from spectrain_ext.pipeline.evaluation import minibatches
from spectrain_ext.pipeline.fitting import share_of
from spectrain_ext.pipeline.loops import checked_batches
from spectrain_ext.pipeline.losses import Keep, LossFn, Result
from spectrain_ext.pipeline.observer import Observer
from spectrain_ext.pipeline.passes import Pass, checked_passes
from spectrain_ext.pipeline.pipeline import Pipeline
from spectrain_ext.schedule import Replicas

from .agreement import check_equal
from .board import Board
from .mesh import layout_of, members_of
from .ranks import Ranks
from .store import GroupPeers

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from spectrain_ext.method import MethodName, Window
    from spectrain_ext.pipeline.applied_method import AppliedMethod, ClipScope

_made: Counter[tuple[int, ...]] = Counter()


class DistributedPipeline(Pipeline):
    """One process's stages of a pipeline over several processes, under any launcher.

    Each rank passes its own stages and otherwise identical arguments, and calls the same methods
    in the same order. With the same ``torch.manual_seed`` and number of threads, results on a CPU
    equal ``Pipeline``'s bit for bit; with replicas, sums may round differently and each replica
    reads its own weight versions. Arguments that are not listed here are those of ``Pipeline``.
    ``state_dict`` holds this rank's keys; ``load_state_dict`` also accepts a whole model's.

    Args:
        stage: stage k on rank k or on each of its replicas; or the list ``stages[rank::ranks]``, of
            the same length on every rank, without replicas.
        loss_fn: called on the ranks of the last stage.
        count: called on rank 0; not allowed where replicas train apart.
        window: counts the microbatches of one replica.
        clip_norm, clip_scope: a global norm makes the ranks wait for one another on the CPU. With
            replicas that train apart, ``"auto"`` clips by stage.
        replicas: ranks per stage, one number or one per stage (default 1; 1 with tied weights).
            Ranks are numbered stage by stage. Replica c of r runs microbatches c, c + r, ...; r
            divides ``microbatches``. All start from the same weights, which is checked here. They
            sum their gradients, or train apart, each on its own minibatches, under a pass that
            says so (``Pass.own_minibatches``).
        group: the pipeline's ranks, stage by stage: a process group, None for the default one; or
            a ``DeviceMesh``, whose dimension ``pp`` has the stages, ``tp`` the ranks that share a
            stage by tensor parallelism, and any other the replicas. Pipelines of other ranks are
            independent.
        device: where the stages go, a CPU or a CUDA device on all ranks; None: they stay. Messages
            use NCCL if every rank has its own GPU, else gloo through CPU memory.
        timeout: seconds that a rank waits for another before all raise ``RankError``; at least 15
            while the pipeline is made.

    Attributes:
        rank: this process's rank among those of the pipeline.
        ranks: the number of ranks.
        timeout: as given.
        replicas: the number of ranks of every stage.
        replica: this process's index among the replicas of its stage, from 0.

    Raises:
        ValueError: as for ``Pipeline``, or an argument differs between ranks.
        RankError: another rank failed or did not arrive in time.

    Example:
        >>> where = f"file://{Path('store').resolve()}"
        >>> torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> pipe = st.DistributedPipeline(
        ...     nn.Linear(4, 1), lambda p: st.optim.SGD(p, lr=0.1), nn.functional.mse_loss
        ... )
        >>> for result in pipe.run([(torch.ones(8, 4), torch.ones(8, 1))] * 2):
        ...     print(result.index, result.loss.shape)
        0 torch.Size([])
        1 torch.Size([])
        >>> torch.distributed.destroy_process_group()
    """

    _processes: Ranks

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss_fn: LossFn,
        method: MethodName | str | Method = "auto",
        *,
        replicas: int | Sequence[int] | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | int | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
        microbatches: int | Literal["auto"] = "auto",
        window: Window = None,
        clip_norm: float | None = None,
        clip_scope: ClipScope = "auto",
        master_dtype: torch.dtype | None = None,
        recompute: bool = False,
        timeout: float = 300.0,
        split_dim: SplitDim = 0,
        count: Callable[[Any], float | Tensor] | None = None,
        passes: Sequence[Pass] = (),
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "DistributedPipeline: there is no process group; call "
                "torch.distributed.init_process_group first"
            )
        if not timeout > 0:
            raise ValueError(f"timeout: expected a positive number of seconds, got {timeout}")
        members = members_of(group)
        rank, ranks = members.index(dist.get_rank()), len(members)
        # All ranks make their pipelines in the same order, so a count identifies this one.
        prefix = f"spectrain_ext/{'-'.join(map(str, members))}/{_made[members]}"
        _made[members] += 1
        store = PrefixStore(prefix, _get_default_store())
        board = Board(store, rank, ranks, timeout, kept_elsewhere=members[0] != 0)
        with board.run(starts=True):
            modules = [stage] if isinstance(stage, nn.Module) else list(stage)
            layout = layout_of(group, len(modules), replicas)
            own_passes = checked_passes(passes, find_method(method))
            for each in own_passes:
                if each.own_minibatches:
                    _check_apart(type(each).__name__, layout.replicas, clip_scope, count)
                    clip_scope = "stage"
            of_every_stage: list[Pass] = []
            if layout.shards is not None:
                from .shards import TensorParallel, prepare

                prepare(modules, layout.shards)
                of_every_stage = [TensorParallel(layout.shards)]
            processes = Ranks(
                members=members,
                prefix=prefix,
                board=board,
                layout=layout,
                passes=own_passes,
                of_every_stage=of_every_stage,
                clip_norm=clip_norm,
                settings={"clip_scope": clip_scope, "split_dim": repr(split_dim)},
                of_stage={"loss_fn": loss_fn, "master_dtype": master_dtype, "recompute": recompute},
            )
            devices = None if device is None else [device] * len(modules)
            super().__init__(
                modules,
                optimizer,
                loss_fn,
                method,
                devices,
                scheduler=scheduler,
                microbatches=microbatches,
                window=window,
                clip_norm=clip_norm,
                clip_scope=clip_scope,
                master_dtype=master_dtype,
                recompute=recompute,
                split_dim=split_dim,
                count=count,
                passes=own_passes,
                _processes=processes,
            )
        self._board, self.timeout = board, timeout
        self.rank, self.ranks = rank, ranks
        self.replicas, self.replica = layout.replicas.counts, processes.replica

    def run(
        self,
        batches: Iterable[object] | None = None,
        *,
        trace: Observer | Sequence[Observer] | None = None,
        keep: Keep | None = None,
    ) -> Iterator[Result]:
        """Train on every batch. Every rank calls this, and gets a result for every minibatch.

        Args:
            batches: as for ``Pipeline``, on rank 0 only: whole minibatches. Rank 0 sends inputs to
                the other replicas of stage 0 and targets to the last stage; a batch that is a
                mapping is both. Besides tensors, only None, bools, numbers and strings can be sent.
                Other ranks ignore this argument.
            trace: records or measures what this rank runs.
            keep: as for ``Pipeline``. Only results on the ranks of the last stage carry it; each
                replica there keeps its own microbatches' part.

        Yields:
            A ``Result`` per minibatch, as soon as the stages of this rank have issued their update
            from it. Except on the last stage, reading the loss raises RuntimeError without the
            pass ``ShareLoss``. Leaving the loop by ``break``, ``return`` or ``close()`` on rank 0
            ends the run of all ranks; on any other rank, it trains on the rest of the run. Leaving
            it by an exception is a failure. So is dropping the iterator in another way, unless all
            ranks do so after the same result.

        Raises:
            RankError: another rank failed or kept this one waiting too long. Every rank then ends
                with the same first cause and the path of a report. A watchdog ends a rank that is
                stuck: it writes to stderr and exits with code 1.
            ValueError: rank 0 has no batches, or its loader gives each process only a part of the
                samples (the message names its sampler).
            StageError: as for ``Pipeline``, on the rank that failed. Other exceptions likewise.

        The pipeline cannot run again after a failure.
        """
        elsewhere = sorted(set(range(len(self.replicas))).difference(self._processes.indices))
        for origin in {cut_of(stage).origin for stage in self.children()}:
            if origin is not None and elsewhere:
                origin.trained_elsewhere(elsewhere)
        run = super().run(self._own_batches(batches), trace=trace, keep=keep)
        self._board.latest_run = ref(run)
        return run

    def _own_batches(self, batches: Iterable[object] | None) -> Iterable[object]:
        if self.rank:
            return ()
        if batches is None:
            raise ValueError("batches: rank 0 needs them, got None")
        all_of_them = self.ranks == dist.get_world_size()  # else other pipelines may take the rest
        if all_of_them and self.ranks > 1 and (share := share_of(batches)) is not None:
            raise ValueError(_needs_all(*share))
        return checked_batches(batches)

    def _agreed(self, make: Callable[[], list[AppliedMethod]]) -> list[AppliedMethod]:
        made: list[AppliedMethod] = []

        def terms() -> dict[str, object]:
            made.extend(make())
            return self._processes.terms(made)

        of_ranks = self._gather_from_ranks(terms, "changing the method")
        check_equal(of_ranks, self.rank, of_ranks[self.rank])
        return made

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Set the parameters to the replicas' average inside a ``with`` block, between two runs.

        On exit each replica gets its own weights back. Unless replicas train apart, nothing
        changes. All ranks must enter it. ``evaluate`` and
        calling the pipeline enter it themselves; ``state_dict`` holds the replica's own weights
        unless called inside.

        Raises:
            RuntimeError: a run has not ended, or an earlier one failed.
            RankError: another rank has failed.
        """
        with ExitStack() as held, self._wires.caller_ordered():
            what = "averaging the replicas"
            with self.together(what), self._board.busy(what):
                found = [
                    (stage.weights, each.evaluated_weights()())
                    for stage in self._wires.stages
                    for each in stage.passes
                    if each.own_minibatches and stage.weights is not None
                ]
            for weights, values in found:
                held.enter_context(weights.holding(values))
            yield

    def _forward_all(self, *given: Any, **more: Any) -> None:
        with self.averaged() if self._processes.own_minibatches else nullcontext():
            super()._forward_all(*given, **more)

    @contextmanager
    def together(self, what: str) -> Iterator[Peers]:
        """Watch the other ranks during work that all ranks do together between two runs.

        If a rank fails or keeps the others waiting, all of them end as in a run.
        All ranks enter it, in the same order. Checkpoints use it. Yields the ranks, which can
        exchange values and errors.

        Raises:
            RankError: on exit, if another rank ended or kept this one waiting too long.
            RuntimeError: a run has not ended, or an earlier one failed.
        """
        self.check_drained(what)
        with self._board.together(what):
            yield GroupPeers(self._processes.all_ranks.host, self._board.busy)

    def forward(self, value: Any = None) -> Any:
        """Compute the whole pipeline's output for one batch with the true weights.

        Every rank calls this. Stages keep their training or evaluation mode. No autograd graph is
        built.

        Args:
            value: the input, on rank 0; other ranks ignore it.

        Returns:
            The output on the ranks of the last stage, None on the others.

        Raises:
            RuntimeError: a run has not ended, or an earlier one failed.
            ValueError: rank 0 has no input.
            RankError, StageError: as for ``run``.
        """
        self.check_drained("calling the pipeline")
        replicas, nothing = self._processes.replicas, torch.zeros(1)
        if self.rank == 0 and value is None:
            raise ValueError("value: rank 0 needs the input, got None")
        # The ``split_dim`` of a mapping is that of an input and target in one.
        whole = isinstance(self._batches.split_dim, Mapping)
        batch = value if whole else (nothing if self.rank else value, nothing)
        outputs: list[Any] = []
        # Batches are dealt to replicas in turn, so repeat this one until each replica has it.
        batches = minibatches([batch] * lcm(*replicas.counts), replicas, alone=False)
        self._forward_all(batches, lambda output, _: outputs.append(output), evaluates=False)
        return outputs[0] if self.places[-1].stage == replicas.stages - 1 else None


def _needs_all(what: str, name: str, count: int) -> str:
    ours, theirs = "it num_replicas=1 and rank=0", "the loader that Accelerate has not prepared"
    remedy = f"give {ours if name == 'num_replicas' else theirs}"
    return (
        f"batches: a {what} with {name}={count} gives this process a part of the samples, and "
        "nobody would take the rest, as rank 0 has the only loader of a pipeline, and deals "
        f"microbatches out to replicas; {remedy}"
    )


def _check_apart(by: str, replicas: Replicas, clip_scope: str, count: object) -> None:
    """Refuse what replicas that train on minibatches of their own cannot have."""
    if len(set(replicas.counts)) > 1 or replicas.counts[0] == 1:
        raise ValueError(
            f"{by}: needs the same number of replicas of every stage, at least 2, got "
            f"{list(replicas.counts)}"
        )
    if clip_scope == "global":
        raise ValueError(
            f"{by}: clip_scope='global' is a norm of one gradient, and every replica has its own; "
            "expected clip_scope='stage'"
        )
    if count is not None:
        raise ValueError(
            f"count: with {by} every replica has a minibatch of its own; have loss_fn return a "
            "pair (sum, count)"
        )
