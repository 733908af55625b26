"""Tests passes that a user writes: their steps, hooks and copies."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checked_streams import checked_streams
from helpers.pipeline_cases import batches, losses, mse, tanh_stages

import spectrain_ext as st
from spectrain_ext.passes import Kind, Pass
from spectrain_ext.schedule import STEPS_OF_TRAINING


class Scales(Pass):
    """Multiplies gradients by a number, and notes what it is called with."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on(self, stage: Any, processes: Any) -> Scales:
        made = super().on(stage, processes)
        made.seen = []
        return made

    def begin(self, run: Any) -> Any:
        self.seen.append("begin")
        found = {Kind.CHANGE_GRADIENTS: self._scale, Kind.UPDATE: self._updated}
        # Of steps that the caller's batches, losses and other stages bring, a pass is a part too.
        if not self.stage.index:
            found[Kind.PULL] = lambda i, j: self.seen.append(("pulled", i, j))
        if run.is_last:
            found[Kind.LOSS] = lambda i, j: self.seen.append(("counted", i, j))
        return found

    def _scale(self, i: int, j: int) -> None:
        with self.stage.changing_gradients() as gradients:
            torch._foreach_mul_(gradients, self.factor)
        self.seen.append(("scale", i, j, len(gradients)))

    def _updated(self, i: int, j: int) -> None:
        assert all(p.grad is None for p in self.stage.module.parameters())  # after the stage's own
        self.seen.append(("updated", i))

    def lost(self, i: int, j: int, loss: torch.Tensor) -> None:
        self.seen.append(("lost", i, j))


class Halves(Pass):
    """Sends halves of activations, and doubles of gradients: powers of two are exact."""

    def sends_activation(self, i: int, j: int, message: Any) -> Any:
        return message._replace(tensors=tuple(t / 2 for t in message.tensors))

    def received_activation(self, i: int, j: int, message: Any) -> Any:
        return message._replace(tensors=tuple(t * 2 for t in message.tensors))

    def sends_gradient(self, i: int, j: int, message: Any) -> Any:
        return message._replace(tensors=tuple(t * 2 for t in message.tensors))

    def received_gradient(self, i: int, j: int, message: Any) -> Any:
        return message._replace(tensors=tuple(t / 2 for t in message.tensors))


def sgd(rate: float) -> Any:
    return lambda params: st.optim.SGD(params, lr=rate, momentum=0.5)


@pytest.mark.parametrize("method", ["1f1b", "auto", "zb-h1", "spectrain"])
def test_steps_and_hooks(method: str) -> None:
    """Gradients times two are a rate times two, to the bit; what crosses comes back as it was."""
    data, stages = batches(5, size=4), tanh_stages(3)
    plain = st.Pipeline(copy.deepcopy(stages), sgd(0.25), mse, method, microbatches=2)
    expected = losses(plain, data)
    with checked_streams():
        passes = [Halves(), Scales(2.0)]
        pipe = st.Pipeline(stages, sgd(0.125), mse, method, microbatches=2, passes=passes)
        assert losses(pipe, data) == expected
    for (name, mine), theirs in zip(
        pipe.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    of_stages = [seen for (seen,) in pipe.collect(Scales, lambda each: each.seen)]
    for k, seen in enumerate(of_stages):
        scaled = [step for step in seen if step == "begin" or step[0] in ("scale", "updated")]
        assert [step for step in seen if step[0] == "pulled"] == [
            ("pulled", i, 0) for i in range(6) if not k
        ]
        assert (("counted", 4, 1) in seen) == (k == 2)
        assert scaled[:3] == ["begin", ("scale", 0, 0, 4), ("updated", 0)]
        assert len(scaled) == 1 + 2 * len(data)
        assert (("lost", 4, 1) in seen) == (k == 2)
    assert passes[1].__dict__ == {"factor": 2.0}  # stages have copies
    assert repr(passes) == "[Halves(), Scales(factor=2.0)]"
    assert repr(pipe._wires.stages[0].passes[1]).startswith("Scales(factor=2.0")


def test_the_page_has_all_steps_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    rows = re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \|", page, re.MULTILINE)
    shown = [Kind[name] for row in rows for name in re.findall(r"`([A-Z_]+)`", row)]
    assert sorted(shown, key=list(Kind).index) == sorted(STEPS_OF_TRAINING, key=list(Kind).index)


def test_what_is_no_pass_of_the_pipeline_is_not_collected() -> None:
    pipe = st.Pipeline(tanh_stages(2), sgd(0.1), mse)
    with pytest.raises(ValueError, match="collect: the pipeline has no pass Halves"):
        pipe.collect(Halves, repr)
