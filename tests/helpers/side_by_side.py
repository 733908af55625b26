"""Averages replicas of a pipeline in one process: inner, because each is a thread and no rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from threading import Condition, Thread
from typing import Any

from oracle.definition import cut
from torch import Tensor

from spectrain_ext.passes import AverageWeights, Pass
from spectrain_ext.passes.averaging import Averaging, Exchange
from spectrain_ext.pipeline import Microbatches, Pipeline, Result
from spectrain_ext.rng import StageRandom


class Echoed(AverageWeights):
    """Averages with replicas that are no ranks."""

    def __init__(self, averaging: Averaging, exchange_of: Callable[[int], Exchange]) -> None:
        super().__init__(averaging)
        self._exchange_by_stage = exchange_of

    def _exchange_of(self, stage: Any, processes: Any) -> Exchange:
        return self._exchange_by_stage(stage.index)


class SideBySide:
    """Pipelines with the same initial weights that are averaged like distributed replicas.

    The results have the same bits as ``DistributedPipeline(..., replicas=r, averaging=...)`` with r
    times their microbatches, on a CPU with as many threads: replica c takes microbatches c, c + r,
    ... of every minibatch.

    Attributes:
        pipes: one per replica.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Pass]], Pipeline],
        replicas: int,
        averaging: Averaging,
    ) -> None:
        self._changed = Condition()
        self._failure: BaseException | None = None
        # by stage, message number and replica
        self._sent: Any = defaultdict(lambda: defaultdict(dict))
        self.pipes = tuple(
            make([Echoed(averaging, partial(self._exchange_of, replica))])
            for replica in range(replicas)
        )
        for replica, pipe in enumerate(self.pipes):
            for stage in pipe._wires.stages:
                stage.random = StageRandom(stage.index, stage.device, replica)

    def _exchange_of(self, replica: int, stage: int) -> Exchange:
        return partial(self._send, replica, stage, count())

    # Training

    def run(self, batches: Iterable[object]) -> list[list[Result]]:
        """Train on every batch; return the replicas' results of each."""
        dealt = [self._dealt(batch) for batch in batches]
        results: list[list[Result]] = [[] for _ in self.pipes]

        def train(replica: int) -> None:
            try:
                results[replica] += self.pipes[replica].run(parts[replica] for parts in dealt)
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

        threads = [Thread(target=train, args=(c,)) for c in range(len(self.pipes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return [list(found) for found in zip(*results, strict=True)]

    def _dealt(self, batch: object) -> list[Microbatches]:
        """Return each replica's microbatches."""
        microbatches = sum(pipe.places[0].microbatches for pipe in self.pipes)
        split_dim = self.pipes[0]._batches.split_dim
        parts = [
            value if value is target else (value, target)
            for value, target, _ in cut(batch, microbatches, split_dim)
        ]
        return [Microbatches(parts[c :: len(self.pipes)]) for c in range(len(self.pipes))]

    def _send(
        self, replica: int, stage: int, numbers: Iterator[int], message: Tensor
    ) -> Callable[[], Sequence[Tensor]]:
        with self._changed:
            sent = self._sent[stage][next(numbers)]
            sent[replica] = message.clone()
            self._changed.notify_all()

        def arrived() -> Sequence[Tensor]:
            with self._changed:
                self._changed.wait_for(lambda: len(sent) == len(self.pipes) or self._failure)
            if len(sent) < len(self.pipes):
                raise RuntimeError("another replica has failed") from self._failure
            return [sent[c] for c in range(len(self.pipes))]

        return arrived

    # Between runs

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Provide in all pipelines the parameters of ``DistributedPipeline.averaged``."""
        for pipe in self.pipes:
            pipe.check_drained("averaged")
        stages = [stage for pipe in self.pipes for stage in pipe._wires.stages if stage.weights]
        begun = [each.evaluated_weights() for stage in stages for each in stage.passes]
        found = [average() for average in begun]
        with ExitStack() as held:
            for stage, values in zip(stages, found, strict=True):
                held.enter_context(stage.weights.holding(values))
            yield

    def evaluate(
        self, batches: Iterable[object], metrics: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Evaluate the averages, with the first replica's buffers, as ``Pipeline.evaluate``."""
        with self.averaged():
            return self.pipes[0].evaluate(batches, metrics)
