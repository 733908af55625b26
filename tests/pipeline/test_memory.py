"""Tests a stage's measured weight versions and activations against its schedule."""

from __future__ import annotations

import gc
import weakref
from operator import attrgetter

import pytest
import torch
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from oracle.memory import most_versions
from oracle.methods import METHODS, window_of
from oracle.schedules import FLUSHING, most_in_flight, order
from torch import nn

import spectrain_ext as st
from spectrain_ext.method import find_method, places_of, rules_at
from spectrain_ext.tools.simulation import streams, validate

WIDTH = 64
# Of a stage's weights, twice as large as a gradient: whole alignment units, so without padding.
BYTES = 2 * WIDTH * WIDTH * 8


def stage():
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    return nn.Sequential(*layers, nn.Tanh())


WITH_WINDOWS = ("interleaved-async", "wpipe")  # fixed windows


def cases():
    """(method, stages, microbatches, window) for every method and window that it has."""
    for method, definition in METHODS.items():
        n, previous = min(4, definition.stages), definition.reads == "previous"
        yield method, n, n if previous else 3, None
        if not previous and definition.schedule not in (*FLUSHING, *WITH_WINDOWS):
            yield method, n, 1, "wide"


def pipeline(method, n, m, window=None, **more):
    if window is not None:
        more["window"] = window
    optimizer = sgd(lr=0.1, smoothed=METHODS[method].averaged)
    stages = [stage() for _ in range(n)]
    return st.Pipeline(stages, optimizer, mse, method, microbatches=m, **more)


@pytest.fixture
def large_storages():
    """Return a function: address -> bytes of the test's storages as large as a stage's weights.

    Earlier objects are frozen, which hides them from the list of objects.
    """

    def found(tensors=None):
        if tensors is None:
            tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        storages = (tensor.untyped_storage() for tensor in tensors)
        return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() >= BYTES}

    gc.freeze()
    yield found
    gc.unfreeze()


class Held:
    """A saved tensor that can be watched."""

    def __init__(self, tensor):
        self.tensor = tensor


class Tapes:
    """Bytes that autograd keeps for later backwards, per stage."""

    def __init__(self, stages):
        self.now, self.peak = [0] * len(stages), [0] * len(stages)
        self.inside, self.stages = None, stages
        for k, module in enumerate(stages):
            module.register_forward_pre_hook(lambda *_, k=k: setattr(self, "inside", k))
            module.register_forward_hook(lambda *_: setattr(self, "inside", None))

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, attrgetter("tensor"))
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        # Otherwise an output would hold its own node until a backward releases everything: the
        # second half of one runs only some nodes.
        k, held = self.inside, Held(tensor.detach())
        if k is not None:
            weights = {p.untyped_storage().data_ptr() for p in self.stages[k].parameters()}
            if tensor.untyped_storage().data_ptr() not in weights:
                self.count(k, tensor.nbytes)
                weakref.finalize(held, self.count, k, -tensor.nbytes)
        return held

    def count(self, k, size):
        self.now[k] += size
        self.peak[k] = max(self.peak[k], self.now[k])


def one_tape(size):
    """Return the bytes that one microbatch's forward keeps in a stage."""
    with Tapes([stage()]) as tapes:
        kept = tapes.stages[0](torch.randn(size, WIDTH, requires_grad=True))
        del kept
    return tapes.peak[0]


@pytest.mark.parametrize(("method", "n", "m", "window"), list(cases()))
def test_versions_and_activations_are_what_the_definition_needs(
    method, n, m, window, large_storages
):
    """Counted among all live tensors, and as simulations count them."""
    windows = [window_of(METHODS[method], window, k, n, m) for k in range(n)]
    versions = [most_versions(method, k, n, windows, m) for k in range(n)]
    size, count = 2, 2 * max(windows) // m + 6
    pipe = pipeline(method, n, m, window)
    with Tapes(list(pipe.children())) as tapes:
        run = pipe.run(batches(count, size * m, WIDTH))
        for _ in range(max(windows) // m + 4):
            next(run)
        state = [e for o in pipe.optimizers for kept in o.state.values() for e in kept.values()]
        others = large_storages(tensor for tensor in state if torch.is_tensor(tensor))
        found = {where: size for where, size in large_storages().items() if where not in others}
        list(run)
    assert len(found) == sum(versions)
    assert all(size < 1.1 * BYTES for size in found.values())  # includes only alignment
    assert pipe.weight_version_bytes == sum(versions) * BYTES
    schedule = METHODS[method].schedule
    flying = [most_in_flight(order(schedule, k, n, windows[k], m, [m] * count)) for k in range(n)]
    assert tapes.peak == [most * one_tape(size) for most in flying]
    assert tapes.now == [0] * n
    for stages in (pipe.predicted_memory(), pipe.measured_memory()):
        assert stages == [
            (held, held * BYTES, most) for held, most in zip(versions, flying, strict=True)
        ]
    own = find_method(method)
    rules = [rules_at(own, place) for place in places_of(own, n, m, window)]
    sizes = {"minibatches": 24, "microbatches": m, "windows": windows}
    counts = validate(streams(own.schedule, windows, m), **sizes, rules=rules)
    assert [count.versions for count in counts] == versions


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "spectrain"])
def test_recomputation_keeps_no_activations(method):
    """Except those of the microbatch in its backward, and the inputs of the others."""
    pipe = pipeline(method, 4, 3, recompute=True)
    with Tapes(list(pipe.children())) as tapes:
        losses(pipe, batches(6, 2 * 3, WIDTH))
    assert tapes.peak == [one_tape(2)] * 4


WIDE = {"master_dtype": torch.float32}


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("vanilla", {}, [1, 1, 1, 1]),
        ("spectrain", {}, [2, 2, 2, 2]),
        ("pipedream", {}, [4, 3, 2, 1]),  # the working buffer holds one of N - k in flight
        ("pipedream", {"window": "wide"}, [7, 5, 3, 1]),
        ("pipedream", {"microbatches": 4}, [2, 2, 2, 1]),
        ("pipedream-vertical-sync", {}, [4, 4, 4, 4]),
        ("lwp-w", {}, [3, 3, 3, 1]),
        ("pipedream-2bw", {"microbatches": 4}, [2, 2, 2, 2]),
        ("error-feedback", {"microbatches": 4}, [4, 4, 4, 3]),
        # A master of another dtype makes the newest version a copy as well.
        ("vanilla", WIDE, [2, 2, 2, 2]),
        ("pipedream", WIDE, [5, 4, 3, 2]),
        ("pipedream-2bw", {"microbatches": 4, **WIDE}, [3, 3, 3, 2]),
    ],
)
@pytest.mark.parametrize("idle", [False, True])
def test_the_numbers_of_a_few(method, more, expected, idle):
    """A stage without weights has none."""
    dtype = torch.bfloat16 if "master_dtype" in more else torch.float64
    stages = [stage.to(dtype) for stage in tanh_stages(4)]
    if idle:
        stages[2], expected = nn.Tanh(), [*expected[:2], 0, expected[3]]
    pipe = st.Pipeline(stages, sgd(lr=1e-3), mse, method, **{"microbatches": 1, **more})
    predicted = pipe.predicted_memory()
    assert [stage.versions for stage in predicted] == expected
    losses(pipe, [(x.to(dtype), y.to(dtype)) for x, y in batches(14, size=10)])
    assert pipe.measured_memory() == predicted
    assert sum(stage.weight_bytes for stage in predicted) == pipe.weight_version_bytes


@pytest.mark.parametrize("method", ["xpipe", "pipedream-2bw", "second-order"])
def test_minibatches_of_one_sample_hold_at_most_one_version_more(method):
    """They have no last microbatch, which otherwise drops what its minibatch has read."""
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, method, microbatches=3)
    losses(pipe, batches(30, size=1))
    pairs = zip(pipe.measured_memory(), pipe.predicted_memory(), strict=True)
    assert all(measured.versions <= predicted.versions + 1 for measured, predicted in pairs)


def test_release_frees_the_buffers(large_storages):
    pipe = pipeline("pipedream", 3, 1)
    losses(pipe, batches(6, 1, WIDTH))
    held = len(large_storages())
    pipe.release()
    gc.collect()
    assert held >= 6 and large_storages() == {}
    assert [stage.weight_bytes for stage in pipe.measured_memory()] == [0] * 3


def test_master_weights_are_float32_and_outlive_a_run():
    """A new run goes on with all of their digits, except where the parameter was changed."""
    stages = [stage.bfloat16() for stage in tanh_stages(2)]
    pipe = st.Pipeline(stages, sgd(lr=1e-6), mse, "spectrain", master_dtype=torch.float32)
    p = stages[0][0].weight
    before = p.detach().clone()
    losses(pipe, [(x.bfloat16(), y.bfloat16()) for x, y in batches(5)])
    moved = pipe.masters()[p].clone()
    assert torch.equal(p, before)  # the updates are too small for bfloat16
    assert moved.dtype == torch.float32 and not torch.equal(moved, before.float())
    losses(pipe, [])
    assert torch.equal(pipe.masters()[p], moved)
    with torch.no_grad():
        p[0] = moved[0] = 0.5
    losses(pipe, [])
    assert torch.equal(pipe.masters()[p], moved)
