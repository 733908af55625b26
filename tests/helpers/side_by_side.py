"""Averages replicas of a pipeline in one process: inner, because each is a thread and no rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, Thread
from typing import Any

from helpers.meeting import Meeting
from oracle.definition import cut

from spectrain_ext.operators.averaging import Averaging
from spectrain_ext.pipeline import Microbatches, Pipeline, Result
from spectrain_ext.pipeline.averaging import Averaged
from spectrain_ext.rng import StageRandom


class SideBySide:
    """Pipelines with the same initial weights that are averaged like distributed replicas.

    The results have the same bits as ``DistributedPipeline(..., replicas=r, averaging=...)`` with r
    times their microbatches, on a CPU with as many threads: replica c takes microbatches c, c + r,
    ... of every minibatch.

    Attributes:
        pipes: as given.
    """

    def __init__(self, pipes: Sequence[Pipeline], averaging: Averaging) -> None:
        self.pipes = tuple(pipes)
        self._meeting = meeting = Meeting(len(pipes))
        for replica, pipe in enumerate(pipes):
            found = {}
            for stage in pipe._executor.stages:
                stage.random = StageRandom(stage.index, stage.device, replica)
                if pipe._clip_scope == "auto":
                    stage.global_norm = None  # as in distributed training
                if stage.weights is not None:
                    exchange = meeting.exchange(replica, stage.index)
                    found[stage.index] = Averaged(stage, averaging, exchange)
            pipe._executor.connections.averaged = found

    # Training

    def run(self, batches: Iterable[object]) -> Iterator[list[Result]]:
        """Train on every batch."""
        meeting = self._meeting
        counts = [pipe.places[0].microbatches for pipe in self.pipes]
        dealer = _Dealer(batches, counts, self.pipes[0]._executor.connections.split_dim)
        results: list[deque[Result]] = [deque() for _ in self.pipes]
        running = set(range(len(self.pipes)))

        def train(replica: int) -> None:
            try:
                for result in self.pipes[replica].run(dealer.batches(replica)):
                    with meeting.changed:
                        results[replica].append(result)
                        meeting.changed.notify_all()
            except BaseException as error:
                dealer.stop()
                meeting.fail(error)
            with meeting.changed:
                running.discard(replica)
                meeting.changed.notify_all()

        threads = [Thread(target=train, args=(c,), name=f"replica {c}") for c in running]
        for thread in threads:
            thread.start()
        try:
            while True:
                with meeting.changed:
                    meeting.changed.wait_for(lambda: all(results) or not running)
                    if not all(results):
                        break
                    found = [queue.popleft() for queue in results]
                yield found
        finally:
            dealer.stop()
            for thread in threads:
                thread.join()
        if meeting.failure is not None:
            raise meeting.failure

    # Between runs

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Provide in all pipelines the parameters of ``DistributedPipeline.averaged``."""
        for pipe in self.pipes:
            pipe.check_drained("averaged")
        each = [one for pipe in self.pipes for one in pipe._executor.connections.averaged.values()]
        begun = [averaged.average() for averaged in each]
        found = [average() for average in begun]
        with ExitStack() as held:
            for averaged, values in zip(each, found, strict=True):
                held.enter_context(averaged.holding(values))
            yield

    def evaluate(
        self, batches: Iterable[object], metrics: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Evaluate the averages, with the first replica's buffers, as ``Pipeline.evaluate``."""
        with self.averaged():
            return self.pipes[0].evaluate(batches, metrics)


class _Dealer:
    """Takes the caller's batches, one thread at a time, and distributes each one's microbatches."""

    def __init__(
        self, batches: Iterable[object], microbatches: Sequence[int], split_dim: object
    ) -> None:
        self._split_dim = split_dim
        self._source = iter(batches)
        self._microbatches = microbatches
        self._lock = Lock()
        self._dealt: list[deque[object]] = [deque() for _ in microbatches]
        self._ended = False

    def stop(self) -> None:
        with self._lock:
            self._ended = True

    def batches(self, replica: int) -> Iterator[object]:
        while True:
            with self._lock:
                mine = self._dealt[replica]
                if not mine and not self._take():
                    return
                batch = mine.popleft()
            yield batch

    def _take(self) -> bool:
        """Distribute the next batch; return whether there was one."""
        batch = None if self._ended else next(self._source, None)
        if batch is None:
            self._ended = True
            return False
        parts = [
            value if value is target else (value, target)
            for value, target, _ in cut(batch, sum(self._microbatches), self._split_dim)
        ]
        for c, queue in enumerate(self._dealt):
            queue.append(Microbatches(parts[c :: len(self._dealt)]))
        return True
