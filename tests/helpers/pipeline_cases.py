"""Models, batches and comparisons of the pipeline tests."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.checked_streams import checked_streams
from hypothesis import HealthCheck, settings
from oracle.definition import Oracle
from torch import nn

import spectrain_ext as st

from .passes import with_passes

METHODS = ("sync", "vanilla", "pipedream", "spectrain", "spectrain-stash")
every_method = pytest.mark.parametrize("method", METHODS)

SGD_ARGS = {"lr": 0.05, "momentum": 0.9}
mse = nn.functional.mse_loss


def in_float64():
    """The oracle's precision; tests set their own seeds and thread counts."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with checked_streams():
        yield
    torch.set_default_dtype(torch.float32)


float64 = pytest.fixture(autouse=True)(in_float64)  # of all tests of a file that imports it


def tanh_stages(n, width=5, layers=2):
    return [
        nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))
        for _ in range(n)
    ]


def batches(count, size=3, width=5, last=None):
    sizes = [size] * count
    if last is not None:
        sizes[-1] = last
    return [(torch.randn(s, width), torch.randn(s, width)) for s in sizes]


def sgd(**changed):
    return lambda params: st.optim.SGD(params, **{**SGD_ARGS, **changed})


def torch_sgd(**changed):
    return lambda params: torch.optim.SGD(params, **{**SGD_ARGS, **changed})


def examples(count):
    """Settings for an expensive property; the nightly profile runs 20 times as many examples."""
    return settings(
        max_examples=count * settings.default.max_examples // 100,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def losses(pipe, data):
    return [result.loss for result in pipe.run(data)]


class Compared:
    """A pipeline and the oracle of the same stages, run together."""

    def __init__(
        self,
        stages,
        method,
        *,
        definition=None,
        loss_fn=mse,
        optimizer=None,
        scheduler=None,
        **more,
    ):
        """``definition``: the oracle's row for a test's own method; other arguments go to both."""
        mine, theirs = optimizer or (sgd(), torch_sgd())
        more.setdefault("microbatches", 1)
        stages = copy.deepcopy(nn.ModuleList(stages))  # together: what is tied stays so
        offload = more.pop("offload", None)  # it changes no result
        self.oracle = Oracle(stages, theirs, loss_fn, definition or method, scheduler, **more)
        more |= {"scheduler": scheduler, "offload": offload}
        self.pipe = st.Pipeline(list(stages), mine, loss_fn, method, **with_passes(more))

    def run(self, data):
        expected = self.oracle.run(data)
        results = list(self.pipe.run(data))
        assert [result.index for result in results] == list(range(len(data)))
        for result, loss in zip(results, expected, strict=True):
            close(result.loss, loss, equal_nan=self.oracle.skips)
        self.check_weights()

    def leave(self, data, at):
        """Leave the loop at a result; the oracle trains on every batch taken."""
        taken = []
        for result in self.pipe.run(batch for batch in data if taken.append(batch) is None):
            if result.index == at:
                break
        assert at < len(taken)
        self.oracle.run(taken)
        self.check_weights()

    def check_rates(self):
        paces = [pace for pace in self.oracle.paces if pace]
        for mine, theirs in zip(self.pipe.optimizers, paces, strict=True):
            assert [group["lr"] for group in mine.param_groups] == pytest.approx(theirs.own)

    def check_weights(self):
        for stage, expected in zip(self.pipe.children(), self.oracle.stages, strict=True):
            found = stage.state_dict()
            for name, tensor in expected.state_dict().items():
                close(found[name], tensor)


def close(found, expected, **more):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, **more)
