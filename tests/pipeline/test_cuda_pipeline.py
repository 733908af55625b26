"""Tests pipeline stages on one GPU: the CPU's result, reproducible bits, no host waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.passes import with_passes
from torch import Tensor, nn

import spectrain_ext as st
from spectrain_ext.transport import new_stream

pytestmark = pytest.mark.cuda
_WIDTH, _CLASSES = 24, 5
# Methods for plain SGD, four stages and any number of microbatches.
_OTHERS = ("spectrain-smoothed", "pipedream-2bw", "error-feedback", "xgrad")
_METHODS = [m for m in st.methods() if m not in _OTHERS]
_sgd = partial(st.optim.SGD, lr=0.05, momentum=0.9)
_torchs = partial(torch.optim.AdamW, lr=0.01)
_FOREIGN = [(method, {"optimizer": _torchs}) for method in ("vanilla", "pipedream", "lwp-w")]
_WIDE = {"microbatches": 1, "window": "wide"}


def _stages(device: str) -> list[nn.Module]:
    torch.manual_seed(11)
    middle = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(3)]
    return [m.double().to(device) for m in [*middle, nn.Linear(_WIDTH, _CLASSES)]]


def _batches(count: int, device: str) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(5)
    out = []
    for _ in range(count):
        x = torch.randn(8, _WIDTH, generator=gen, dtype=torch.float64)
        y = torch.randint(0, _CLASSES, (8,), generator=gen)
        out.append((x.to(device), y.to(device)))
    return out


def _pipeline(method: str, device: str, optimizer: Any = _sgd, **options: Any) -> st.Pipeline:
    devices = ["cuda:0" if device == "cuda" else device] * 4
    loss = nn.functional.cross_entropy
    return st.Pipeline(_stages(device), optimizer, loss, method, devices, **with_passes(options))


def _small(stages: list[nn.Module], **options: Any) -> st.Pipeline:
    return st.Pipeline([s.cuda() for s in stages], _sgd, nn.functional.mse_loss, **options)


def _train(method: str, device: str, count: int = 24, **options: Any) -> list[Tensor]:
    """Return losses and all weights."""
    pipe = _pipeline(method, device, **options)
    losses = [r.loss for r in pipe.run(_batches(count, device))]
    return [tensor.detach().cpu().clone() for tensor in [*losses, *pipe.state_dict().values()]]


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("method", "options"),
    [*((m, {"microbatches": parts}) for m in _METHODS for parts in (1, 4)), *_FOREIGN],
)
def test_the_result_of_the_cpu(method: str, options: dict[str, Any]) -> None:
    expected, found = (_train(method, device, **options) for device in ("cpu", "cuda"))
    rtol, atol = (1e-7, 1e-9) if "optimizer" in options else (1e-9, 1e-12)
    torch.testing.assert_close(found[:24], expected[:24], rtol=rtol, atol=atol)
    torch.testing.assert_close(found[24:], expected[24:], rtol=10 * rtol, atol=10 * atol)


@pytest.mark.parametrize(
    ("method", "options", "other"),
    [
        *((method, {}, {}) for method in _METHODS),
        # An optimizer of torch's allocates its state and its temporaries on the stage's stream.
        *((method, options, {}) for method, options in _FOREIGN),
        # What waits on the host or is made again has the bits of what is kept on the device.
        *(
            (method, {} if method == "gpipe" else _WIDE, other)
            for method in ("gpipe", "pipedream", "spectrain-stash")
            for other in ({"offload": "activations"}, {"recompute": True})
        ),
    ],
)
def test_the_same_bits_each_time(
    method: str, options: dict[str, Any], other: dict[str, Any]
) -> None:
    """Repeated runs reveal a missing wait."""
    first = _train(method, "cuda", count=64, **options)
    for _ in range(3):
        assert _same(_train(method, "cuda", count=64, **options, **other), first)


def test_an_optimizer_that_is_not_the_packages_goes_on_alone() -> None:
    """Its state, read during and after a run, was written on the stages' streams."""
    found = []
    for device in ("cpu", "cuda"):
        pipe = _pipeline("lwp-w", device, optimizer=_torchs)
        seen = []
        for result in pipe.run(_batches(12, device)):
            if result.index in (3, 8):
                states = [o.state_dict()["state"] for o in pipe.optimizers]
                seen += [e["exp_avg_sq"].sum().clone() for s in states for e in s.values()]
        for optimizer in pipe.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
        list(pipe.run(_batches(4, device)))
        pipe.release()
        for p in pipe.parameters():
            p.grad = torch.ones_like(p)
        for optimizer in pipe.optimizers:
            optimizer.step()
        found.append([*seen, *(p.detach() for p in pipe.parameters())])
    for host, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine.cpu(), host, rtol=1e-6, atol=1e-8)


def _written(method: str, device: str) -> list[Tensor]:
    """Return losses and all weights, where forwards and hooks of steps write weights too."""

    def clamp(module: nn.Module, _: object) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):  # no backward needs its bias
                layer.bias.detach().clamp_(-0.05, 0.05)

    def shrink(optimizer: Any, *_: object) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.data.mul_(0.99)

    pipe = _pipeline(method, device, microbatches=2)
    for stage, optimizer in zip(pipe.children(), pipe.optimizers, strict=True):
        stage.register_forward_pre_hook(clamp)
        optimizer.register_step_post_hook(shrink)
    found = [result.loss for result in pipe.run(_batches(24, device))]
    return [tensor.detach().cpu().clone() for tensor in [*found, *pipe.state_dict().values()]]


@pytest.mark.parametrize("method", ["auto", "1f1b", "vanilla", "spectrain", "zb-h1-async"])
def test_what_modules_and_hooks_write_is_that_of_the_cpu(method: str) -> None:
    """They write versions on the stages' streams, and the true weights follow."""
    expected, found, again = (_written(method, device) for device in ("cpu", "cuda", "cuda"))
    assert _same(found, again)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("method", ["vanilla", "pipedream", "spectrain"])
def test_true_weights_in_the_loop_are_those_of_the_cpu(method: str) -> None:
    """They are read on the caller's stream while updates wait on those of the stages."""
    found = []
    for device in ("cpu", "cuda", "cuda"):
        pipe = _pipeline(method, device)
        norms = []
        for _ in pipe.run(_batches(24, device)):
            with pipe.weights():
                norms += [p.detach().square().sum() for p in pipe.parameters()]
        found.append([value.cpu() for value in (*norms, *pipe.state_dict().values())])
    assert _same(found[1], found[2])
    assert _same(found[1][len(norms) :], _train(method, "cuda")[24:])
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [*((method, _sgd) for method in _METHODS), ("vanilla", _torchs), ("lwp-w", _torchs)],
)
def test_no_host_synchronization_in_steady_state(method: str, optimizer: Any) -> None:
    pipe = _pipeline(method, "cuda", optimizer)
    batches = _batches(60, "cuda")
    list(pipe.run(batches[:12]))
    losses = []
    torch.cuda.synchronize()
    try:
        for result in pipe.run(batches):
            losses.append(result.loss)
            if result.index == 15:
                torch.cuda.set_sync_debug_mode("error")
            if result.index == 45:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == 60 and all(bool(x.isfinite()) for x in losses)


def test_the_callers_stream_may_be_another_one() -> None:
    """Batches made on, and losses read on, a stream that is not the default one."""
    expected = _train("spectrain", "cuda")[:24]
    pipe = _pipeline("spectrain", "cuda")
    ready = _batches(24, "cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    losses = []

    def late() -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in ready:
            x2 = torch.full_like(x, torch.nan)
            torch.cuda._sleep(2_000_000)
            x2.copy_(x)
            yield x2, y

    with torch.cuda.stream(side):
        for result in pipe.run(late()):
            losses.append(result.loss * 1.0)
    side.synchronize()
    assert _same([loss.cpu() for loss in losses], expected)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("kind", ["dense", "transposed", "conjugate", "on the host"])
def test_a_copy_comes_after_what_it_waits_for(kind: str, target: int) -> None:
    """Without a stream being current: late work, a copy on a stream, and its use on a third."""
    if target >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    source, to = torch.device("cuda", 0), torch.device("cuda", target)
    one, copies, other = (new_stream(kind, each) for each in (source, source, to))
    layout = {"transposed": lambda t: t.view(256, 512).t(), "conjugate": torch.conj}.get(kind)
    whole = torch.arange(512.0 * 256).view(512, 256)
    if kind == "conjugate":
        whole = torch.complex(whole, whole + 1)
    written = whole.clone().to("cpu" if kind == "on the host" else source)
    base, received = written.clone(), torch.zeros_like(whole, device=to)
    given = written if layout is None else layout(written)
    for n in (1.0, 2.0, 3.0):
        with one.using():
            torch.cuda._sleep(20_000_000)
            torch.mul(base, n, out=written)
        copies.wait_stream(one)
        copies.copy([(received, given)])
        other.wait(copies.mark())
        with other.using():
            found = received.cpu()
        one.wait_stream(copies)  # before it writes again
        copies.wait_stream(other)
        assert torch.equal(found, whole * n if layout is None else layout(whole * n))


def test_batches_from_the_host() -> None:
    pipe = _pipeline("spectrain", "cuda")
    losses = [r.loss.cpu() for r in pipe.run(_batches(24, "cpu"))]
    assert _same(losses, _train("spectrain", "cuda")[:24])


def test_memory_does_not_grow() -> None:
    pipe = _pipeline("spectrain", "cuda")
    allocated = []
    for _ in range(4):
        list(pipe.run(_batches(30, "cuda")))
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated) <= allocated[0] + 2**20


def test_large_batches_of_the_host_do_not_keep_it() -> None:
    """Each batch is overwritten after it is passed in, while the device is still busy."""
    width, count, size = 64, 12, 512  # 128 KiB each
    gen = torch.Generator().manual_seed(3)
    data = [torch.randn(size, width, generator=gen) for _ in range(count)]

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.cuda._sleep(20_000_000)
            return x * 1.0

    def losses(refill: bool, slow: bool) -> Tensor:
        torch.manual_seed(2)
        first = nn.Linear(width, width)
        stages = [nn.Sequential(Slow(), first) if slow else first, nn.Linear(width, width)]
        pipe = _small(stages)
        shared = torch.empty(size, width)

        def given() -> Iterator[Any]:
            for x in data:
                if refill:
                    shared.copy_(x)
                    yield shared, shared
                    shared.fill_(torch.nan)
                else:
                    yield x.cuda(), x.cuda()

        return torch.stack([result.loss for result in pipe.run(given())]).cpu()

    expected = losses(refill=False, slow=False)
    assert torch.equal(losses(refill=True, slow=True), expected)


def test_a_captured_module_is_refused() -> None:
    module = nn.Linear(8, 8).cuda()
    torch.cuda.make_graphed_callables(module, (torch.randn(4, 8, device="cuda"),))
    with pytest.raises(ValueError, match="was captured in CUDA graphs"):
        st.Pipeline([module], st.optim.SGD, nn.functional.mse_loss)


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_in_a_run_and_after_it(recompute: bool) -> None:
    """Read between two results, each time on another stream of the caller."""

    def found(wait: bool) -> list[Tensor]:
        torch.manual_seed(4)
        stages = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)]
        pipe = _small(stages, recompute=recompute)
        states = []
        gen = torch.Generator().manual_seed(5)
        data = [torch.randn(16, 8, generator=gen).cuda() for _ in range(20)]
        torch.cuda.synchronize()
        for result in pipe.run([(x, x) for x in data]):
            if wait:
                torch.cuda.synchronize()
            if result.index % 5 == 0:
                with torch.cuda.stream(torch.cuda.Stream()):
                    states.append(pipe.state_dict())
                    for optimizer in pipe.optimizers:
                        states.append(optimizer.state_dict()["state"])
        with torch.cuda.stream(torch.cuda.Stream()):
            pipe.release()
            states.append(pipe.state_dict())
        torch.cuda.synchronize()
        return [leaf.cpu() for state in states for leaf in _tensors(state)]

    assert all(map(torch.equal, found(wait=False), found(wait=True)))


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [t for value in state.values() for t in _tensors(value)] if state else []


def test_a_batch_on_host_and_device() -> None:
    """Only the second input tensor is on the device, and late."""

    class Add(nn.Linear):
        def forward(self, pair: Any) -> Tensor:
            return super().forward(pair[0] + pair[1])

    def losses(late: bool) -> Tensor:
        torch.manual_seed(6)
        pipe = _small([Add(8, 8), nn.Linear(8, 8)])
        gen = torch.Generator().manual_seed(7)

        def given() -> Iterator[Any]:
            for _ in range(10):
                x = torch.randn(4, 8, generator=gen)
                y = x.cuda()
                on_device = torch.full_like(y, torch.nan) if late else y.clone()
                if late:
                    torch.cuda._sleep(5_000_000)
                    on_device.copy_(y)
                yield (x, on_device), y
                if late:
                    on_device.fill_(torch.nan)

        return torch.stack([result.loss for result in pipe.run(given())]).cpu()

    assert torch.equal(losses(late=True), losses(late=False))


_ASSERTED = """
import torch, spectrain_ext as st
from torch import nn

class Fails(nn.Module):
    def forward(self, x):
        torch.ones(4, device="cuda")[torch.full((1,), 9, device="cuda")]
        torch.cuda.synchronize()
        return x

stages = [nn.Linear(4, 4).cuda(), nn.Sequential(nn.Linear(4, 4), Fails()).cuda()]
pipe = st.Pipeline(stages, lambda p: st.optim.SGD(p, lr=0.1, momentum=0.9), nn.functional.mse_loss)
try:
    list(pipe.run([(torch.ones(2, 4), torch.ones(2, 4))] * 3))
except st.StageError as error:
    print("stage", error.stage, error.action)
"""


def test_a_device_assert_names_its_stage() -> None:
    """In a separate process: no CUDA call succeeds after it."""
    done = subprocess.run(
        [sys.executable, "-c", _ASSERTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert "stage 1 forward" in done.stdout, done.stderr


def test_a_forward_becomes_part_of_a_graph_and_a_run_does_not() -> None:
    pipe = _pipeline("spectrain", "cuda")
    batches = _batches(4, "cuda")
    list(pipe.run(batches))
    value = batches[0][0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        pipe(value)  # cuBLAS makes what it needs
        with torch.cuda.graph(graph):
            out = pipe(value)
        value.copy_(batches[1][0])
        graph.replay()
        assert torch.equal(out, pipe(batches[1][0]))
    refused = pytest.raises(RuntimeError, match="cannot become part of a CUDA graph")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), refused:
        next(iter(pipe.run(batches)))
    assert len(list(pipe.run(batches))) == 4
