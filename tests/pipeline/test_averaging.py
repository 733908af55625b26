"""Tests averaged replicas against the oracle: inner, because an echo stands for a thread."""

from __future__ import annotations

from functools import partial
from itertools import cycle

import pytest
import torch
from helpers.checked_streams import checked_streams
from helpers.replica_programs import data, mse, sgd, stages, steps
from helpers.side_by_side import Echoed, SideBySide
from oracle.averaging import ElasticOracle, SparseOracle
from torch import nn

import spectrain_ext as st
from studies.sparse import Sparse

METHODS = [
    *("sync", "gpipe", "1f1b", "vanilla", "pipedream", "pipedream-2bw", "spectrain"),
    *("spectrain-stash", "auto", "second-order", "lwp-w", "xpipe", "pipedream-vertical-sync"),
    "error-feedback",
]
WAYS = {
    "elastic": (st.averaging.Elastic(0.3), lambda: (ElasticOracle, 0.3)),
    "sparse": (Sparse(0.25, 2, 0.6), lambda: (SparseOracle, 0.25, 2, 0.6)),
}
RUNS = ((6, 12, 5), (4, 12, None))


def hidden(width, n=2):
    """Return stages that exchange blocks of 3 (width 40) or 1,024 weights (width 12,000)."""
    torch.manual_seed(3)
    layers = (nn.Linear(5, width).double() for _ in range(n))
    return [nn.Sequential(layer, nn.Tanh(), nn.AdaptiveAvgPool1d(5)) for layer in layers]


def torch_sgd(params):
    return torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.01)


OPTIMIZERS = {
    "SGD": (sgd, torch_sgd),
    "AdamW": (partial(st.optim.AdamW, lr=0.02), partial(torch.optim.AdamW, lr=0.02)),
    "another's SGD": (torch_sgd, torch_sgd),
}


def group(averaging, method, replicas=2, microbatches=4, optimizer=sgd, made=stages, **more):
    more |= {"microbatches": microbatches // replicas, "scheduler": steps}

    def make(passes):
        return st.Pipeline(made(2), optimizer, mse, method, passes=passes, **more)

    return SideBySide(make, replicas, averaging)


def trained(side, runs=RUNS):
    return [
        [[result.loss.item() for result in found] for found in side.run(data(*run))] for run in runs
    ]


def weights(pipe):
    return torch.cat([p.detach().reshape(-1) for p in pipe.parameters()])


@pytest.mark.parametrize(
    ("method", "way", "replicas", "optimizer", "made"),
    [
        *((name, way, 2, "SGD", stages) for name, way in zip(METHODS, cycle(WAYS), strict=False)),
        *((method, "sparse", 2, "SGD", stages) for method in ("auto", "spectrain")),
        *(("auto", way, 3, "AdamW", stages) for way in WAYS),
        *(("pipedream", way, 3, "another's SGD", stages) for way in WAYS),
        *(("vanilla", "sparse", 2, "SGD", lambda n, w=width: hidden(w)) for width in (40, 12000)),
    ],
)
def test_methods_are_what_the_oracle_says(method, way, replicas, optimizer, made):
    averaging, oracle_of = WAYS[way]
    mine, theirs = OPTIMIZERS[optimizer]
    more = {"microbatches": 2 * replicas}
    side = group(averaging, method, replicas, optimizer=mine, made=made, **more)
    kind, *numbers = oracle_of()
    oracle = kind(*numbers, replicas, made(2), theirs, mse, method, steps, **more)
    near = {"rtol": 1e-7, "atol": 1e-9} if optimizer == "AdamW" else {"rtol": 1e-9, "atol": 1e-12}
    wanted = [oracle.run(data(*run)) for run in RUNS]
    torch.testing.assert_close(trained(side), wanted, **near)
    for c, pipe in enumerate(side.pipes):
        wanted = torch.cat([oracle.rows(k)[c] for k in range(2)])
        torch.testing.assert_close(weights(pipe), wanted, **near)
    with side.averaged():
        wanted = torch.cat([oracle.evaluated(k) for k in range(2)])
        for pipe in side.pipes:
            torch.testing.assert_close(weights(pipe), wanted, **near)
    assert not torch.equal(weights(side.pipes[0]), weights(side.pipes[1]))


@pytest.mark.parametrize("way", WAYS)
def test_masters_and_rounded_weights_are_averaged_together(way):
    """float32 true weights with bfloat16 working weights; also 16 bits alone."""
    for master in (torch.float32, None):

        def narrow(n):
            return [stage.bfloat16() for stage in stages(n)]

        side = group(WAYS[way][0], "spectrain", made=narrow, master_dtype=master)
        pieces = [(x.bfloat16(), y.bfloat16()) for x, y in data(12, 12)]
        first, *_, last = [sum(r.loss.item() for r in found) for found in side.run(pieces)]
        assert last < first * 2  # random targets: no divergence
        for pipe in side.pipes:
            for p, true in pipe.masters().items():
                assert torch.equal(p, true.bfloat16())


@pytest.mark.parametrize(
    ("way", "method"), [("elastic", "pipedream"), ("sparse", "spectrain"), ("elastic", "auto")]
)
def test_streams_are_ordered(method, way):
    """Vector clocks check them; an echo stands for another replica and its thread."""
    with checked_streams():
        passes = [Echoed(WAYS[way][0], lambda stage: lambda sent: lambda: [sent, sent])]
        pipe = st.Pipeline(stages(3), sgd, mse, method, microbatches=2, passes=passes)
        for run in ((6, 12, 5), (3, 12, None)):
            assert len(list(pipe.run(data(*run)))) == run[0]


def test_weights_that_are_loaded_have_a_centre_of_their_own():
    side = group(st.averaging.Elastic(0.5), "vanilla")
    trained(side)
    other = nn.Sequential(*stages(2))
    for pipe in side.pipes:
        pipe.load_state_dict(other.state_dict())
    with side.averaged():
        assert torch.equal(weights(side.pipes[0]), weights(other))


def test_bad_values():
    with pytest.raises(ValueError, match="strength"):
        st.averaging.Elastic(-0.1)
    for more, match in (
        ({"share": 0.0}, "share: expected above 0"),
        ({"share": 1.5}, "share: expected above 0"),
        ({"delay": -1}, "delay: expected at least 0"),
        ({"decay": 1.0}, "decay: expected from 0 to below 1"),
        ({"delay": 1.0}, "delay: expected an int"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            Sparse(**more)
    assert hash(Sparse(0.1)) == hash(Sparse(0.1))


def test_state_that_does_not_fit():
    def made(averaging):
        return averaging.begin(torch.zeros(5), lambda sent: lambda: [sent, sent], 0)

    late = made(Sparse(0.5, 2))
    for n in range(3):
        late.made(torch.full((5,), 1.0 * n))
        late.after(torch.full((5,), 1.0 * n))
    tensors, updates = late.state()
    assert updates == 3
    made(Sparse(0.5, 2)).load_state(tensors, updates)
    for averaging, given, match in (
        (Sparse(0.5, 4), tensors, "expected 'part"),
        (st.averaging.Elastic(0.5), tensors, "expected 'centre', torch.float32 of shape .* none"),
        (st.averaging.Elastic(0.5), {"centre": torch.zeros(4)}, r"got torch.float32 of shape \(4,"),
        (st.averaging.Elastic(0.5), {"centre": torch.zeros(5) * 1j}, "got torch.complex64"),
    ):
        with pytest.raises(ValueError, match=match):
            made(averaging).load_state(given, updates)
