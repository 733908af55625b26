"""Tests that a pipeline refuses bad arguments: each error names them, and nothing changes."""

from __future__ import annotations

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
from torch.optim.lr_scheduler import LRScheduler, StepLR

import spectrain_ext as st
from spectrain_ext.method import find_method

T, V = TypeError, ValueError


class Measured(LRScheduler):
    def step(self, metrics):
        """Take a metric, as ReduceLROnPlateau does, which is another class."""

    def _initial_step(self): ...


def refused(error, match, stages=None, optimizer=None, loss_fn=mse, **more):
    """Check that the constructor raises and leaves the modules unchanged."""
    stages = tanh_stages(3) if stages is None else stages
    modules = [s for s in stages if isinstance(s, nn.Module)] if isinstance(stages, list) else []
    params = [p for m in modules for p in m.parameters() if type(p) is nn.Parameter]
    before = [(p, p.device, p.detach().clone()) for p in params if p.device.type == "cpu"]
    with pytest.raises(error, match=match) as caught:
        st.Pipeline(stages, optimizer or sgd(), loss_fn, **more)
    for p, device, value in before:
        assert p.device == device
        assert torch.equal(p, value) and p.untyped_storage().nbytes() == p.nbytes
    return caught.value


# Stages


def shared():
    return [(part := nn.Linear(5, 5)), nn.Tanh(), part]


def nested():
    part = nn.Linear(5, 5)
    return [nn.Sequential(nn.Tanh(), part), nn.Sequential(part)]


def frozen(*modules):
    return [module.requires_grad_(False) for module in modules]


def made_in_inference_mode(module):
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(5, 5), module())


class Complex(nn.Linear):
    def __init__(self):
        super().__init__(5, 5, dtype=torch.cdouble)


def scripted():
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        return nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(5, 5)))


def on_meta():
    return nn.Linear(5, 5, device="meta")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: [], V, "stages: expected at least one module, got an empty list"),
        (lambda: [nn.Linear(2, 2), 3], T, r"stages\[1\]: expected an nn.Module, got 3"),
        (lambda: [nn.ReLU], T, r"stages\[0\]: expected an nn.Module, got <class '.*ReLU'>"),
        (lambda: nn.Linear(2, 2), T, "sequence of modules, got Linear; st.partition"),
        (shared, V, r"stages\[2\]: it is stages\[0\] again, the very .*deepcopy"),
        (nested, V, r"stages\[1\]: its module '0' is module '1' of stages\[0\] as well"),
        (nested, V, r"stages may share parameters: .*head\.weight = embedding\.weight"),
        (lambda: frozen(nn.Tanh()), V, r"stages: none has a trainable parameter.*is_trainable"),
        (lambda: frozen(nn.Tanh(), nn.Linear(5, 5)), V, "stages: none has a trainable parameter"),
        (lambda: [nn.Linear(5, 5), nn.LazyLinear(5)], V, r"\[1\]: parameter 'weight' is not init"),
        (lambda: [scripted()], T, r"\[0\]: its module '1' is a RecursiveScriptModule of torch.jit"),
        (
            lambda: [nn.Tanh(), Complex()],
            T,
            r"\[1\]: parameter 'weight' is torch.complex128, .*real",
        ),
        (lambda: [made_in_inference_mode(nn.Tanh)], V, r"'0.weight' was made in inference mode"),
        (
            lambda: [made_in_inference_mode(lambda: nn.BatchNorm1d(5, affine=False))[1:]],
            V,
            r"stages\[0\]: buffer '1.running_mean' was made in .*; .* copy.deepcopy\(module\)",
        ),
        (lambda: [nn.Sequential(on_meta())], V, r"\[0\]: parameter '0.weight' is on the meta"),
    ],
)
def test_stages(make, error, match):
    refused(error, match, make())


def test_a_captured_module():
    """A module from ``make_graphed_callables``; test_cuda_pipeline.py has it with a GPU."""
    module = nn.Sequential(nn.Tanh(), nn.Linear(5, 5))
    module[1].forward = module[1].forward.__func__.__get__(module[1])
    st.Pipeline([module], sgd(), mse).release()  # any other forward of its own
    replay = type(module[1]).forward.__get__(module[1])
    module[1].forward = lambda x: replay(x)
    module[1].forward.__module__ = "torch.cuda.graphs"
    refused(V, r"stages\[0\]: its module '1' was captured in CUDA graphs", [module])


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_modules_that_other_data_parallelism_wraps_or_shards(mesh):
    wrapped = nn.parallel.DistributedDataParallel
    sharded = fully_shard(nn.Sequential(nn.Linear(5, 5)), mesh=mesh)
    normalized = distribute_module(nn.Sequential(nn.BatchNorm1d(5, affine=False)), mesh)
    why = r"is wrapped in DistributedDataParallel, .*replicas=\.\.\."
    for stage, said in (
        (wrapped(nn.Linear(5, 5)), f"it {why}"),
        (nn.Sequential(nn.Linear(5, 5), wrapped(nn.Linear(5, 5))), f"its module '1' {why}"),
        (torch.compile(wrapped(nn.Linear(5, 5))), f"its module '_orig_mod' {why}"),
        (sharded, r"it is sharded by fully_shard \(FSDP2\), .* group=mesh"),
        (normalized, r"buffer '0.running_mean' is a DTensor, .* group=mesh"),
    ):
        refused(T, rf"stages\[1\]: {said}", [nn.Linear(5, 5), stage])


# Optimizers, losses and schedulers


class NeedsMore(torch.optim.SGD):
    def __init__(self, params, lr, *, groups):
        super().__init__(params, lr=lr)


def loss_of_two(output, target):
    return mse(output, target)


def partly_smoothed(params):
    groups = [{"params": params[:1], "smoothed": True}, {"params": params[1:]}]
    return st.optim.SGD(groups, lr=0.1, momentum=0.9)


def partly_still(params):
    return sgd()([{"params": params[:2]}, {"params": params[2:], "momentum": 0.0}])


OPTIMIZER = st.optim.SGD([torch.zeros(1)], lr=0.1)
SCHEDULER = StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)
SWAPPED = r"optimizer: it is called with \(parameters\), .*are optimizer and loss_fn swapped\?"
SMOOTHED = r"stages\[0\] under method 'spectrain-smoothed': parameter group 1 has no smoothed mom"
MADE = r"scheduler: for stages\[0\] it made a "


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"optimizer": lambda p: None}, T, "made a builtins.NoneType, expected .*optim.SGD\\("),
        ({"optimizer": OPTIMIZER}, T, r"a function of \(parameters\), got SGD; optimizer=lambda"),
        ({"optimizer": lambda p: sgd()(p[1:])}, V, r"for stages\[0\] it holds 3 .* the stage's 4"),
        ({"optimizer": NeedsMore}, T, r"and NeedsMore takes \(params, lr, groups\); optimizer=lam"),
        ({"optimizer": partial(NeedsMore, lr=0.1)}, T, r"NeedsMore takes \(params, groups\)"),
        ({"optimizer": nn.MSELoss(), "loss_fn": lambda parameters: OPTIMIZER}, T, SWAPPED),
        ({"optimizer": mse_loss}, T, SWAPPED),
        ({"optimizer": loss_of_two, "loss_fn": torch.optim.SGD}, T, SWAPPED),
        ({"optimizer": nn.MSELoss(), "loss_fn": partial(torch.optim.SGD, lr=0.1)}, T, SWAPPED),
        ({"optimizer": partial(mse_loss, reduction="sum"), "loss_fn": OPTIMIZER}, T, SWAPPED),
        ({"optimizer": partly_still, "method": "spectrain"}, V, "group 1 has momentum 0"),
        ({"optimizer": partly_smoothed, "method": "spectrain-smoothed"}, V, SMOOTHED),
        ({"loss_fn": OPTIMIZER}, T, r"^loss_fn: .* swapped\?"),
        ({"loss_fn": None}, T, r"a function of \(output, target\), got NoneType"),
        ({"loss_fn": nn.Linear(5, 1)}, V, "loss_fn: it has trainable parameters"),
        ({"loss_fn": lambda y: y.mean()}, T, r"loss_fn: .*<lambda> takes \(y\)"),
        ({"loss_fn": nn.MSELoss}, T, r"the class MSELoss: loss_fn=MSELoss\(\)"),
        ({"scheduler": 3}, T, r"scheduler: expected a function of \(optimizer\), got int$"),
        ({"scheduler": StepLR}, T, r"takes \(optimizer, step_size\); scheduler=lambda optimizer: "),
        ({"scheduler": SCHEDULER}, T, "got StepLR; scheduler=lambda optimizer: StepLR"),
        ({"scheduler": lambda o: None}, T, MADE + "NoneType, expected"),
        ({"scheduler": lambda o: o}, T, MADE + "SGD, expected a learning-rate"),
        ({"scheduler": lambda o: SCHEDULER}, V, MADE + "StepLR of another optimizer"),
        ({"scheduler": Measured}, V, MADE + r"Measured, whose step\(\) needs metrics; the"),
    ],
)
def test_functions(arguments, error, match):
    refused(error, match, **arguments)


def test_what_an_optimizer_raises_has_its_place():
    error = refused(ZeroDivisionError, "", optimizer=lambda parameters: 1 / 0)
    assert error.__notes__ == ["in optimizer, for stages[0]"]


def test_an_optimizer_that_is_bound_already():
    made = []

    def optimizer(params):
        made.append(sgd()(params))
        if len(made) == 2:
            made[-1].stepper.bind(
                None, {"momentum_buffer": {p: torch.zeros_like(p) for p in params}}
            )
        return made[-1]

    refused(RuntimeError, "bound already", optimizer=optimizer)


def test_another_optimizer_or_scheduler_in_the_place_of_one():
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, scheduler=lambda o: StepLR(o, 1))
    for held in (pipe.optimizers, pipe.schedulers, pipe.random):
        with pytest.raises(TypeError, match="'tuple' object does not support item assignment"):
            held[0] = held[1]


# Methods and windows


def test_a_method_is_checked_on_all_stages_before_any_optimizer_is_made():
    stages = [*tanh_stages(2), nn.Tanh()]  # the last has nothing to train
    own = st.Method("own", "", lead=lambda place: place.stage // 2)
    refused(V, "method: lead of 'own' at stage 2 of 3", stages, lambda p: 1 / 0, method=own)


OFFLOAD = st.passes.OffloadActivations()
AVERAGE = st.passes.AverageWeights(st.averaging.Elastic(0.4))
CLIPS_BY_0 = dataclasses.replace(find_method("vanilla"), name="own", clip=lambda p: p.stage)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"method": "zero"}, V, f"there is no 'zero'; there are {', '.join(st.methods())}"),
        ({"method": None}, T, "method: expected a name or a Method, got NoneType"),
        ({"method": st.Method("own", "", chunks=0)}, V, "chunks of 'own'.*stage 0"),
        ({"window": [1, 3, 1]}, V, "window: stage 1 of 3 would wait .* a deadlock"),
        ({"microbatches": 0}, V, "microbatches: expected at least 1, got 0"),
        ({"microbatches": 2.0}, T, "microbatches: expected an int or 'auto', got float"),
        ({"microbatches": True}, T, "microbatches: expected an int or 'auto', got bool"),
        ({"devices": ["cpu", "cpu"]}, V, r"devices: expected one per stage \(3\), got 2"),
        ({"devices": "cpu"}, T, "devices: expected a sequence of 3 devices, got 'cpu'"),
        ({"devices": ["cpu", "gpu", "cpu"]}, V, r"devices\[1\]: 'gpu' is not a device"),
        ({"devices": ["cpu", "cpu", "meta"]}, V, r"devices\[2\]: expected the CPU or .*meta"),
        ({"clip_norm": 0.0}, V, "clip_norm: expected a number > 0, got 0"),
        ({"clip_norm": float("nan")}, V, "clip_norm: expected a number > 0, got nan"),
        ({"clip_norm": "1"}, T, "clip_norm: expected a number, got str"),
        ({"method": CLIPS_BY_0}, V, "'own' for stage 0 of 3: expected a number > 0, got 0"),
        (
            {"clip_scope": "all"},
            V,
            r"clip_scope: expected one of \('auto', .*\), got 'all'",
        ),
        ({"method": "sync", "clip_scope": "global"}, V, "'global' needs a clip_norm"),
        ({"master_dtype": torch.int32}, (T, V), "master_dtype"),
        ({"master_dtype": torch.float64}, V, "master_dtype: expected torch.float32, or None"),
        ({"recompute": 1}, T, "recompute: expected a bool, got int; to recompute blocks, "),
        ({"passes": [OFFLOAD], "recompute": True}, V, "OffloadActivations: with recompute=True, "),
        ({"passes": [AVERAGE]}, V, r"AverageWeights: stages\[0\] has no replicas here"),
        ({"passes": OFFLOAD}, T, "passes: expected a list of passes, got OffloadActivations"),
        ({"passes": ["skip"]}, T, r"passes\[0\]: expected a Pass, got 'skip'"),
        ({"passes": [OFFLOAD, type(OFFLOAD)]}, T, r"passes\[1\]: .*: OffloadActivations\(...\)"),
        ({"passes": [OFFLOAD, OFFLOAD]}, V, r"passes\[1\]: there is another OffloadActivations"),
        ({"count": 3}, T, "count: expected a callable, got int"),
    ],
)
def test_options(arguments, error, match):
    refused(error, match, **{"method": "vanilla", **arguments})


@pytest.mark.parametrize("codec", ["int8", (st.codecs.Int8(), 8), st.codecs.Int8, (None,) * 3])
def test_values_that_no_pass_takes(codec):
    with pytest.raises(TypeError, match=r"codec: expected a value with pack\(\) and unpack\(\)"):
        st.passes.Compress(codec)
    with pytest.raises(ValueError, match="then: expected 'raise' or 'skip', got True"):
        st.passes.CheckFinite(True)


def test_a_pipeline_made_in_inference_mode():
    with torch.inference_mode():
        refused(RuntimeError, "^Pipeline: inference mode is on; training needs autograd")


class OneStep(st.passes.Pass):
    def __init__(self, kind):
        self.kind = kind

    def begin(self, run):
        return {self.kind: lambda i, j: None}


@pytest.mark.parametrize(
    "kind",
    [*(getattr(st.passes.Kind, k) for k in ("RECEIVE_WORD", "SEND_WORD", "MEASURE")), "clip"],
)
def test_steps_that_no_training_has(kind):
    """Some of an evaluation wait for what never comes in a training, and hold all stages up."""
    pipe = st.Pipeline(tanh_stages(2), sgd(), mse, passes=[OneStep(kind)])
    before = [p.detach().clone() for p in pipe.parameters()]
    match = rf"passes: begin\(\) of OneStep returned a handler for {kind}, which is no step"
    with pytest.raises(ValueError, match=match):
        losses(pipe, batches(3))
    assert all(map(torch.equal, pipe.parameters(), before)) and pipe.minibatches == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none():
    said = r"devices\[1\]: cuda:0 was asked for, but there is no CUDA device here"
    refused(RuntimeError, said, devices=["cpu", "cuda:0", "cpu"])


def test_devices_that_are_accepted():
    stages = nn.Sequential(*tanh_stages(3))  # whose children are the stages
    pipe = st.Pipeline(stages, sgd(), mse, devices=["cpu", torch.device("cpu"), "cpu:0"])
    assert len(losses(pipe, batches(3))) == 3


# What is only warned of


def test_a_sum_is_warned_of_where_microbatches_average_it():
    for loss_fn in (nn.MSELoss(reduction="sum"), partial(mse_loss, reduction="sum")):
        with pytest.warns(UserWarning, match=r"loss_fn: its reduction is 'sum'.*of 3 microbatches"):
            st.Pipeline(tanh_stages(2), sgd(), loss_fn, microbatches=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            st.Pipeline(tanh_stages(2), sgd(), loss_fn, microbatches=1)
            st.Pipeline(tanh_stages(2), sgd(), nn.MSELoss(), microbatches=3)


def test_16_bit_weights_without_masters_are_warned_of():
    stages = [nn.Linear(5, 5).bfloat16().requires_grad_(False), nn.Linear(5, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.Pipeline(stages, sgd(), mse).release()
        stages[1].bfloat16()
        st.Pipeline(stages, sgd(), mse, master_dtype=torch.float32).release()
    with pytest.warns(UserWarning, match=r"stages\[1\]: 'weight' is torch.bfloat16.*master_dtype="):
        st.Pipeline(stages, sgd(), mse)
