"""Tests a pipeline's errors: each names the problem, its place and the expected value."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.pipeline_cases import batches, float64, losses, mse, sgd, tanh_stages  # noqa: F401
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

import spectrain_ext as st
from spectrain_ext.method import find_method


def refused(error, match, stages=None, optimizer=None, loss_fn=mse, **more):
    """Check that the constructor raises and leaves the modules unchanged."""
    stages = tanh_stages(3) if stages is None else stages
    modules = [s for s in stages if isinstance(s, nn.Module)] if isinstance(stages, list) else []
    params = [p for m in modules for p in m.parameters() if type(p) is nn.Parameter]
    before = [
        (p, p.data_ptr(), p.device, p.detach().clone()) for p in params if p.device.type == "cpu"
    ]
    with pytest.raises(error, match=match):
        st.Pipeline(stages, optimizer or sgd(), loss_fn, **more)
    for p, pointer, device, value in before:
        assert (p.data_ptr(), p.device) == (pointer, device)
        assert torch.equal(p, value)


def test_stages():
    refused(ValueError, "stages: expected at least one module, got an empty list", [])
    refused(TypeError, r"stages\[1\]: expected an nn.Module, got 3", [nn.Linear(2, 2), 3])
    refused(TypeError, r"stages\[0\]: expected an nn.Module, got <class '.*ReLU'>", [nn.ReLU])
    refused(TypeError, "sequence of modules, got Linear; st.partition", nn.Linear(2, 2))
    st.Pipeline(nn.Sequential(*tanh_stages(2)), sgd(), mse)  # its children are the stages


def test_one_module_in_two_stages():
    shared = nn.Linear(5, 5)
    refused(ValueError, r"stages\[2\]: it is stages\[0\] again, the very .*deepcopy", [
        shared, nn.Tanh(), shared,
    ])  # fmt: skip
    stages = [nn.Sequential(nn.Tanh(), shared), nn.Sequential(shared)]
    refused(ValueError, r"stages\[1\]: its module '0' is module '1' of stages\[0\] as well", stages)
    refused(ValueError, r"stages may share parameters: .*head\.weight = embedding\.weight", stages)


def test_a_captured_module():
    """A module from ``make_graphed_callables``; test_cuda_pipeline.py has it with a GPU."""
    module = nn.Sequential(nn.Tanh(), nn.Linear(5, 5))
    module[1].forward = module[1].forward.__func__.__get__(module[1])
    st.Pipeline([module], sgd(), mse).release()  # any other forward of its own
    replay = type(module[1]).forward.__get__(module[1])
    module[1].forward = lambda x: replay(x)
    module[1].forward.__module__ = "torch.cuda.graphs"
    refused(ValueError, r"stages\[0\]: its module '1' was captured in CUDA graphs", [module])


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_modules_that_other_data_parallelism_wraps_or_shards(group):
    def linear():
        return nn.Linear(5, 5)

    wrapped = nn.parallel.DistributedDataParallel
    for stage, where in (
        (wrapped(linear()), "it"),
        (nn.Sequential(linear(), wrapped(linear())), "its module '1'"),
        (torch.compile(wrapped(linear())), "its module '_orig_mod'"),
    ):
        why = rf"stages\[1\]: {where} is wrapped in DistributedDataParallel, .*replicas=\.\.\."
        refused(TypeError, why, [linear(), stage])
    sharded = fully_shard(nn.Sequential(linear()), mesh=group)
    normalized = distribute_module(nn.Sequential(nn.BatchNorm1d(5, affine=False)), group)
    for stage, what in ((sharded, "parameter '0.weight'"), (normalized, "buffer '0.running_mean'")):
        refused(TypeError, rf"stages\[1\]: {what} is a DTensor, as fully_shard", [linear(), stage])


def test_uninitialized_parameters():
    refused(ValueError, r"stages\[1\]: parameter 'weight' is not initialized", [
        nn.Linear(5, 5), nn.LazyLinear(5),
    ])  # fmt: skip


def test_unknown_method():
    for name in st.methods():
        refused(ValueError, f"method: there is no 'zero'; there are .*{name}", method="zero")
    refused(TypeError, "method: expected a name or a Method, got NoneType", method=None)


def test_method_values():
    method = find_method("spectrain")
    for rule, value, least in (("backward_horizon", -2, 0), ("forward_horizon", -1, 0)):
        bad = dataclasses.replace(method, name="bad", **{rule: lambda p, v=value: v * p.stage})
        refused(ValueError, f"{rule} of 'bad' gives {value} for stage 1 of 3.*{least}", method=bad)
    refused(ValueError, "'xgrad' is defined for at most 1 stage, got 3", method="xgrad")
    refused(
        ValueError,
        "'pipedream-2bw' needs at least 3 microbatches",
        method="pipedream-2bw",
        microbatches=2,
    )


def test_windows():
    refused(ValueError, "window: expected at least 1 for stage 0 of 3, got 0", window=0)
    refused(ValueError, r"window: expected one per stage \(3\), got 2", window=[2, 1])
    refused(ValueError, "window: stage 1 of 3 would wait .* a deadlock", window=[1, 3, 1])
    refused(ValueError, "'sync' finishes every minibatch", window=2, method="sync")


def test_optimizers_that_a_method_is_not_defined_for():
    refused(
        ValueError,
        r"optimizer: stages\[0\] has AdamW, and method 'spectrain-smoothed' is defined for sgd",
        optimizer=lambda params: st.optim.AdamW(params),
        method="spectrain-smoothed",
    )
    refused(
        ValueError,
        r"stages\[0\] under method 'spectrain-smoothed': parameter group 0 has no smoothed mom",
        method="spectrain-smoothed",
    )
    for kind, family in ((st.optim.Adam, "adam"), (st.optim.NAdam, "nadam")):
        others = tuple(f for f in ("sgd", "adam", "adamw", "nadam") if f != family)
        own = dataclasses.replace(find_method("vanilla"), name="own", families=others)
        refused(ValueError, f"has {kind.__name__}, and method 'own'", optimizer=kind, method=own)


def test_optimizers():
    refused(
        TypeError,
        r"made a builtins.NoneType, expected a torch.optim.Optimizer: .*spectrain_ext.optim.SGD\(",
        optimizer=lambda params: None,
    )
    refused(
        TypeError,
        r"optimizer: expected a function of \(parameters\), got SGD; optimizer=lambda parameters: ",
        optimizer=sgd()([torch.zeros(1)]),
    )
    refused(
        ValueError,
        r"optimizer: for stages\[0\] it holds 3 parameters, expected exactly the stage's 4",
        optimizer=lambda params: sgd()(params[1:]),
    )
    refused(TypeError, r"scheduler: expected a function of \(optimizer\), got int$", scheduler=3)


def _loss(output, target):
    return mse(output, target)


@pytest.mark.parametrize(
    ("optimizer", "loss_fn"),
    [
        (nn.MSELoss(), lambda parameters: torch.optim.SGD(parameters)),
        (mse_loss, sgd()),
        (_loss, torch.optim.SGD),
        (nn.MSELoss(), partial(torch.optim.SGD, lr=0.1)),
        (partial(mse_loss, reduction="sum"), sgd()([torch.zeros(1)])),
    ],
)
def test_optimizer_and_loss_swapped(optimizer, loss_fn):
    said = r"optimizer: it is called with \(parameters\), .*are optimizer and loss_fn swapped\?"
    refused(TypeError, said, optimizer=optimizer, loss_fn=loss_fn)
    refused(TypeError, r"^loss_fn: .* swapped\?", loss_fn=sgd()([torch.zeros(1)]))


class NeedsMore(torch.optim.SGD):
    def __init__(self, params, lr, *, groups):
        super().__init__(params, lr=lr)


def test_functions_that_need_more():
    refused(
        TypeError,
        r"optimizer: it is called with \(parameters\), and NeedsMore takes \(params, lr, groups\); "
        r"optimizer=lambda parameters: NeedsMore\(parameters, \.\.\.\)",
        optimizer=NeedsMore,
    )
    refused(TypeError, r"NeedsMore takes \(params, groups\)", optimizer=partial(NeedsMore, lr=0.1))
    refused(
        TypeError,
        r"scheduler: .*StepLR takes \(optimizer, step_size\); scheduler=lambda optimizer: StepLR\(",
        scheduler=StepLR,
    )
    refused(TypeError, r"loss_fn: .*<lambda> takes \(y\)", loss_fn=lambda y: y.mean())
    refused(TypeError, r"the class MSELoss: loss_fn=MSELoss\(\)", loss_fn=nn.MSELoss)
    with pytest.raises(ZeroDivisionError) as caught:
        st.Pipeline(tanh_stages(2), lambda parameters: 1 / 0, mse)
    assert caught.value.__notes__ == ["in optimizer, for stages[0]"]


def test_schedulers():
    other = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    made = r"scheduler: for stages\[0\] it made a "
    refused(TypeError, made + "NoneType, expected", scheduler=lambda optimizer: None)
    refused(
        TypeError, made + "SGD, expected a learning-rate", scheduler=lambda optimizer: optimizer
    )
    refused(
        ValueError,
        made + "StepLR of another optimizer",
        scheduler=lambda optimizer: StepLR(other, 1),
    )
    refused(
        TypeError,
        r"function of \(optimizer\), got StepLR; scheduler=lambda optimizer: StepLR\(optimizer",
        scheduler=StepLR(other, 1),
    )


def test_prediction_needs_momentum():
    for method in ("spectrain", "spectrain-stash"):
        refused(
            ValueError,
            rf"stages\[0\] under method '{method}': .*group 0 has momentum 0",
            optimizer=sgd(momentum=0.0),
            method=method,
        )
    refused(
        ValueError,
        "group 1 has momentum 0",
        optimizer=lambda params: sgd()(
            [{"params": params[:2]}, {"params": params[2:], "momentum": 0.0}]
        ),
        method="spectrain",
    )


def test_momentum_taken_away_later():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, "spectrain")
    losses(pipe, batches(3))
    before = copy.deepcopy(pipe.state_dict())
    pipe.optimizers[1].param_groups[0]["momentum"] = 0.0
    with pytest.raises(st.StageError, match=r"stage 1.*momentum 0"):
        losses(pipe, batches(3))
    pipe.optimizers[1].param_groups[0]["momentum"] = 0.9
    assert torch.equal(pipe.state_dict()["1.0.weight"], before["1.0.weight"])
    losses(pipe, batches(3))


def test_microbatches():
    refused(ValueError, "microbatches: expected at least 1, got 0", microbatches=0)
    refused(ValueError, "microbatches: expected at least 1, got -2", microbatches=-2)
    refused(TypeError, "microbatches: expected an int or 'auto', got float", microbatches=2.0)
    refused(TypeError, "microbatches: expected an int or 'auto', got bool", microbatches=True)


def test_loss_functions():
    refused(
        TypeError, r"loss_fn: expected a function of \(output, target\), got NoneType", loss_fn=None
    )
    refused(ValueError, "loss_fn: it has trainable parameters", loss_fn=nn.Linear(5, 1))


def test_devices():
    refused(ValueError, r"devices: expected one per stage \(3\), got 2", devices=["cpu", "cpu"])
    refused(TypeError, "devices: expected a sequence of 3 devices, got 'cpu'", devices="cpu")
    refused(ValueError, r"devices\[1\]: 'gpu' is not a device", devices=["cpu", "gpu", "cpu"])
    refused(ValueError, r"devices\[2\]: expected the CPU or .*meta", devices=["cpu", "cpu", "meta"])
    stages = [nn.Linear(5, 5), nn.Linear(5, 5, device="meta")]
    refused(ValueError, r"stages\[1\]: parameter 'weight' is on the meta device and has no", stages)
    mixed = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, device="meta"))
    refused(ValueError, r"stages\[0\]: parameter '1.weight' is on the meta device", [mixed])
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse, devices=["cpu", torch.device("cpu"), "cpu:0"])
    assert len(losses(pipe, batches(3))) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none():
    refused(
        RuntimeError,
        r"devices\[1\]: cuda:0 was asked for, but there is no CUDA device here",
        devices=["cpu", "cuda:0", "cpu"],
    )


@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (
            lambda out, y: (out - y) ** 2,
            ValueError,
            r"must return a scalar \(a 0-d tensor\), got shape \(3, 5\)",
        ),
        (lambda out, y: ((out - y) ** 2).mean().reshape(1), ValueError, r"got shape \(1,\)"),
        (lambda out, y: 0.5, TypeError, r"a 0-d tensor, or a pair \(sum, count\), got a float"),
        (lambda out, y: mse(out, y) * 1j, TypeError, "must return a real number, got torch.c"),
        (lambda out, y: mse(out, y).detach(), ValueError, "does not depend on the output"),
        (lambda out, y: (out > y).sum(), ValueError, "does not depend on the output"),
    ],
)
def test_losses(loss_fn, error, match):
    pipe = st.Pipeline(tanh_stages(3), sgd(), loss_fn, microbatches=1)
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, batches(4))
    assert isinstance(caught.value.__cause__, error)
    assert (caught.value.stage, caught.value.minibatch, caught.value.action) == (2, 0, "loss")
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (lambda x: (x, {3}), r"a stage's output\[1\]: expected a tensor, or tuples, .* got a set"),
        (lambda x: None, "a stage's output: expected a tensor in it, got None"),
    ],
)
def test_activations(output, match):
    class Odd(nn.Module):
        def forward(self, value):
            return output(value)

    pipe = st.Pipeline([*tanh_stages(1), Odd(), *tanh_stages(1)], sgd(), mse)
    with pytest.raises(st.StageError, match=match) as caught:
        losses(pipe, batches(4))
    assert isinstance(caught.value.__cause__, TypeError)
    assert caught.value.stage == 1


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (torch.zeros(2, 5), r"batches\[2\]: expected a pair \(input, target\), .* got a Tensor"),
        ((torch.zeros(2, 5),), r"batches\[2\]: expected a pair .* got a tuple of length 1"),
        ([torch.zeros(1)] * 3, r"batches\[2\]: expected a pair .* got a list of length 3"),
        ({"x": 1, "y": [2]}, r"batches\[2\]: expected a tensor in it, got \{'x': 1, 'y': \[2\]\}"),
        (((), None), r"batches\[2\]: expected a tensor in it, got \(\(\), None\)"),
        ([], r"batches\[2\]: expected a pair .* got a list of length 0"),
    ],
)
def test_batches(batch, match):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    good = batches(2)
    with pytest.raises(TypeError, match=match):
        losses(pipe, [*good, batch, *good])
    assert len(losses(pipe, good)) == 2


def test_batches_that_cannot_be_split():
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, microbatches=2)
    with pytest.raises(
        ValueError, match=r"batches\[0\]: .* the input has 4, the target has shape \(3, 5\)"
    ):
        losses(pipe, [(torch.zeros(4, 5), torch.zeros(3, 5))])
    with pytest.raises(
        ValueError, match=r"batches\[0\]: the target: a tensor of shape \(4, 5\) is on the meta"
    ):
        losses(pipe, [(torch.zeros(4, 5), torch.zeros(4, 5, device="meta"))])
    assert len(losses(pipe, batches(2, size=4))) == 2


def test_batches_that_are_not_iterable():
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse)
    for call in (pipe.run, pipe.fit, pipe.evaluate):
        for given in (3, None, lambda: batches(2)):
            with pytest.raises(TypeError, match="batches: expected an iterable of batches, got "):
                call(given)
    with pytest.raises(TypeError, match="callbacks: expected a list of functions, got builtin"):
        pipe.fit(batches(2), 1, print)
    with pytest.raises(TypeError, match="trace: expected an Observer, got bool"):
        pipe.run(batches(2), trace=True)


def test_what_a_module_or_a_loss_was_called_with():
    pipe = st.Pipeline([nn.Linear(5, 5), nn.Linear(5, 3)], sgd(), nn.CrossEntropyLoss())
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    for batch, match in (
        ((y, x), r"stage 0.*forward: .*; called with input torch.int64 of shape \(2,\)$"),
        ({"x": x}, r"; called with input {'x': 'torch.float64 of shape \(2, 5\)'}$"),
        (
            (x, y.float()),
            r"loss: .*; called with output torch.float64 of shape \(2, 3\), target torch.float32",
        ),
    ):
        with pytest.raises(st.StageError, match=match):
            losses(pipe, [batch])
    with pytest.raises(st.StageError, match=r"forward: .*input torch.int64 of shape \(4,\)"):
        pipe.evaluate([(y, x)])
    with pytest.raises(
        st.StageError, match=r"metrics: .*no_metric.*; called with .*target torch.int64 of"
    ):
        pipe.evaluate([(x, y)], {"a": lambda output, target: output.no_metric})


@pytest.mark.parametrize("how", ["to", "assign", "stage"])
def test_a_parameter_that_left_the_flat_buffer(how):
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    losses(pipe, batches(3))
    before = copy.deepcopy(pipe.state_dict())
    if how == "to":
        pipe.to(torch.float32)
    elif how == "assign":
        pipe.load_state_dict(before, assign=True)
    else:
        next(pipe.children()).load_state_dict(tanh_stages(1)[0].state_dict(), assign=True)
    values = copy.deepcopy(pipe.state_dict())
    with pytest.raises(
        RuntimeError, match=r"stages\[0\]: parameter '0.weight' left .* flat buffer"
    ):
        losses(pipe, batches(3))
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, values[name])


def test_two_pipelines_of_one_model():
    stages = tanh_stages(2)
    first = st.Pipeline(stages, sgd(), mse)
    list(first.run(batches(2)))
    second = st.Pipeline(stages, sgd(), mse)
    with pytest.raises(
        RuntimeError, match=r"stages\[0\]: another pipeline of this model .*release"
    ):
        list(first.run(batches(1)))
    list(second.run(batches(1)))
    first.release()
    list(second.run(batches(1)))
    second.release()
    list(first.run(batches(1)))


def test_a_parameter_that_leaves_while_the_run_is_suspended():
    module = tanh_stages(1)[0]
    pipe = st.Pipeline([*tanh_stages(1), module], sgd(), mse)
    seen = []
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '0.weight' left"):
        for result in pipe.run(batches(8)):
            seen.append(result.index)
            module.float().double()
    assert seen == [0]


def test_a_parameter_that_is_replaced_while_the_run_is_suspended():
    module = tanh_stages(1)[0]
    pipe = st.Pipeline([*tanh_stages(1), module], sgd(), mse)
    with pytest.raises(RuntimeError, match=r"stages\[1\]: parameter '0.weight' left"):
        for _ in pipe.run(batches(3)):
            module.load_state_dict(tanh_stages(1)[0].state_dict(), assign=True)


def test_inference_mode_around_a_run():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode is on"):
        losses(pipe, batches(3))


def test_an_optimizer_that_is_bound_already():
    stages, made = tanh_stages(2), []

    def optimizer(params):
        made.append(sgd()(params))
        if len(made) == 2:
            made[-1].bind(None, {"momentum_buffer": {p: torch.zeros_like(p) for p in params}})
        return made[-1]

    before = [p.detach().clone() for stage in stages for p in stage.parameters()]
    with pytest.raises(RuntimeError, match="bound already"):
        st.Pipeline(stages, optimizer, mse)
    params = [p for stage in stages for p in stage.parameters()]
    for p, value in zip(params, before, strict=True):
        assert torch.equal(p, value)
        assert p.untyped_storage().nbytes() == p.nbytes  # stage 0 has its own storage again


def test_autocast_around_a_run():
    pipe = st.Pipeline(tanh_stages(3), sgd(), mse)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="autocast is on"),
    ):
        losses(pipe, batches(3))
    assert len(losses(pipe, batches(3))) == 3


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(reduction="sum"), partial(mse_loss, reduction="sum")]
)
def test_a_sum_is_warned_of_where_microbatches_average_it(loss_fn):
    with pytest.warns(UserWarning, match=r"loss_fn: its reduction is 'sum'.*of 3 microbatches"):
        st.Pipeline(tanh_stages(2), sgd(), loss_fn, microbatches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.Pipeline(tanh_stages(2), sgd(), loss_fn, microbatches=1)
        st.Pipeline(tanh_stages(2), sgd(), nn.MSELoss(), microbatches=3)


def test_16_bit_weights_without_masters_are_warned_of():
    frozen, trained = nn.Linear(5, 5).bfloat16().requires_grad_(False), nn.Linear(5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.Pipeline([frozen, trained], sgd(), mse).release()
        trained.bfloat16()
        st.Pipeline([frozen, trained], sgd(), mse, master_dtype=torch.float32).release()
    with pytest.warns(UserWarning, match=r"stages\[1\]: 'weight' is torch.bfloat16.*master_dtype="):
        st.Pipeline([frozen, trained], sgd(), mse)
