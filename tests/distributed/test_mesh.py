"""Tests pipelines on device meshes: with tensor-parallel stages, replicas, and side by side."""

from __future__ import annotations

import copy
import re
import shutil
import time
from functools import partial
from itertools import count
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from helpers import mesh_programs
from helpers.failing_runs import commit, timeout_of
from helpers.mesh_programs import (
    CLOSE,
    Mlp,
    batches,
    data_of,
    in_one,
    mesh_of,
    on_mesh,
    parallelize,
    whole_state,
)
from helpers.passes import with_passes
from helpers.rank_cases import same
from helpers.ranks import Ranks, printed_by, run_ranks
from helpers.replica_programs import steps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing import assert_close

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointManager

pytestmark = pytest.mark.processes

LLAMA, DROPS, ADAPTED = {"llama": True}, {"dropout": 0.2}, {"adapted": True}

# What composes with tensor parallelism: the whole model in one process computes the same, up to the
# rounding of sums over shards.

COMPOSES = {
    "synchronous": ("1f1b", {"sequence": True, "model": LLAMA}),
    "auto": ("auto", {"optimizer": "adamw"}),
    "auto, activations in shards": ("auto", {"optimizer": "adamw", "sequence": True}),
    "spectrain": ("spectrain", {"model": LLAMA}),
    "spectrain, activations in shards": ("spectrain", {"sequence": True, "optimizer": "nadam"}),
    "stashed weights": ("pipedream", {"sequence": True}),
    "no prediction": ("vanilla", {"window": "wide"}),
    "halves of a backward": ("zb-h1", {"sequence": True}),
    "second order": ("second-order", {}),
    "corrected gradients": ("gap-aware", {"sequence": True}),
    "braked gradients": ("braking", {"sequence": True}),
    "several stages on a rank": ("interleaved", {"count": 4, "sequence": True}),
    "clipped by stage": ("auto", {"sequence": True, "clip_norm": 0.3}),
    "clipped by all stages": ("1f1b", {"sequence": True, "clip_norm": 0.3}),
    "recomputed": ("spectrain", {"sequence": True, "recompute": True}),
    "packed": ("auto", {"codec": st.codecs.Int8()}),
    "packed shards": ("1f1b", {"codec": (None, st.codecs.BFloat16()), "sequence": True}),
    "checked": ("auto", {"on_nonfinite": "skip", "sequence": True}),
    "losses everywhere": ("1f1b", {"share_loss": True}),
    "dropout": ("auto", {"model": DROPS}),
    "torch's AdamW": ("auto", {"optimizer": "torch", "sequence": True}),
    "a hybrid": (st.hybrid("1f1b", "auto", after=3), {"sequence": True}),
}


def size(output, _):
    return output.square().mean()  # of shards, a sum that is not complete


def train(pipe, *count):
    """Return the losses that are known here, the whole state, and an evaluation after it."""
    losses = [r.loss.item() for r in pipe.run(data_of(pipe, *count)) if r.has_loss]
    measured = pipe.evaluate(data_of(pipe, 1), {"loss": mesh_programs.loss, "size": size})
    return losses, whole_state(pipe), measured


def compose(rank, ranks):
    found = []
    mesh = mesh_of(pp=2, tp=ranks // 2)
    for method, settings in COMPOSES.values():
        pipe = on_mesh(mesh, method, **settings)
        found.append(train(pipe))
        pipe.release()
    return found


def test_tensor_parallel_stages_compute_what_one_process_does():
    torch.set_num_threads(1)
    of_ranks = run_ranks(compose, 4)
    for (name, (method, settings)), *found in zip(COMPOSES.items(), *of_ranks, strict=True):
        losses, state, value = train(in_one(method, **settings))
        for rank, (its_losses, its_state, its_value) in enumerate(found):
            knows = settings.get("share_loss") or rank > 1
            assert_close(its_losses, losses if knows else [], **CLOSE, msg=f"{name}, losses")
            assert its_state
            for key, its in its_state.items():
                assert_close(its, state[key], **CLOSE, msg=f"{name}: {key} on rank {rank}")
            assert_close(its_value, value, **CLOSE, msg=f"{name}, evaluation")
        for stage in (found[:2], found[2:]):  # replicated losses and sums have the same bits
            same(stage[0], stage[1], name)


# Data, pipeline and tensor parallelism in eight processes

APART = {"microbatches": 4, "clip_norm": 0.3}  # with as many per replica as stages
TOGETHER = [(method, model) for method in ("1f1b", "auto", "spectrain") for model in ({}, LLAMA)]


def three_kinds(rank, ranks):
    """Train on the whole mesh, and on its parts without tensor parallelism."""
    mesh, found = mesh_of(dp=2, pp=2, tp=2), []
    for method, model in TOGETHER:
        for part, sequence in ((mesh, True), (mesh["dp", "pp"], False)):
            pipe = on_mesh(part, method, model, sequence, **APART)
            found.append(train(pipe, 3))
            pipe.release()
    return found


def test_eight_processes_compute_what_one_does():
    """Replicas under ``spectrain`` read other versions: compared without tensor parallelism."""
    torch.set_num_threads(1)
    of_ranks = run_ranks(three_kinds, 8)
    for n, (method, model) in enumerate(TOGETHER):
        alone = train(in_one(method, model, **APART), 3)
        for rank, found in enumerate(of_ranks):
            on_mesh, on_parts = found[2 * n : 2 * n + 2]
            assert bool(on_mesh[0]) == (rank % 4 > 1)
            losses, state, value = on_parts if method == "spectrain" else alone
            own = {key: state[key] for key in on_mesh[1]}
            for trained in (on_mesh, on_parts):
                expected = (losses if trained[0] else [], own, value)
                assert_close(trained, expected, **CLOSE, msg=f"{method} {model}, rank {rank}")


def as_replicas(rank, ranks):
    """Train replicas on a mesh, on a mesh in another order, and as ranks of a process group."""
    found = []
    for method in ("auto", "spectrain", "pipedream"):
        ways = [(mesh_of(pp=2, dp=2), {}), (mesh_of(dp=2, pp=2), {}), (None, {"replicas": 2})]
        for mesh, more in ways:
            k = rank // 2 if mesh is None else mesh.get_local_rank("pp")
            torch.manual_seed(9)
            pipe = st.DistributedPipeline(
                *(mesh_programs.stages()[k], mesh_programs.OPTIMIZERS["sgd"], mesh_programs.loss),
                *(method,),
                **{"group": mesh, "microbatches": 2, **more},
            )
            found.append((k, *train(pipe)))
            pipe.release()
    return found


def test_replicas_on_a_mesh_are_those_of_a_process_group():
    of_ranks = run_ranks(as_replicas, 4)
    for n in range(0, len(of_ranks[0]), 3):
        first = {k: found for k, *found in (of_rank[n] for of_rank in of_ranks)}
        for of_rank in of_ranks:
            for k, *found in of_rank[n : n + 3]:
                same(found, first[k], f"stage {k}")


def with_shards_of_a_loss(rank, ranks):
    pipe = on_mesh(mesh_of(pp=2, tp=2), "spectrain", whole_output=False)
    with loss_parallel():
        found = train(pipe)
        keep = {"keep": lambda output, _: (size(output, _), size(output.full_tensor(), _))}
        for result in pipe.run(data_of(pipe, 1), **keep):
            if rank > 1:
                assert_close(*result.kept)
    return found


def with_adapters(rank, ranks):
    pipe = on_mesh(mesh_of(pp=2, tp=2), "auto", ADAPTED, optimizer="adamw")
    found = train(pipe)
    assert all("lora" in name for name, p in pipe.named_parameters() if p.requires_grad)
    return found


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        (with_shards_of_a_loss, ("spectrain",)),
        (with_adapters, ("auto", ADAPTED, False, "adamw")),
    ],
)
def test_losses_of_shards_and_adapters(program, settings):
    if program is with_adapters:
        pytest.importorskip("peft")
    expected = train(in_one(*settings))
    for rank, (losses, state, value) in enumerate(run_ranks(program, 4)):
        own = {key: expected[1][key] for key in state}
        both = (losses, state, value), (expected[0] if rank > 1 else [], own, expected[2])
        assert_close(*both, **CLOSE)


def with_masters(rank, ranks):
    """Return what masters of 16-bit weights and their optimizer have, as a checkpoint holds it."""
    pipe = on_mesh(mesh_of(pp=2, tp=2), "auto", NARROW, True, "adamw", **MASTERS)
    return *train(pipe), moments(pipe)


def moments(pipe):
    states = (optimizer.state_dict()["state"] for optimizer in pipe.optimizers)
    return [[state["exp_avg"] for state in each.values()] for each in states]


NARROW, MASTERS = {"dtype": torch.bfloat16}, {"master_dtype": torch.float32, "clip_norm": 0.3}


def test_masters_of_16_bits():
    """Sums over shards are rounded to 16 bits, so a loss may differ by a unit in the last place.

    An update of AdamW hardly depends on the size of a gradient; its moments do.
    """
    pipe = in_one("auto", NARROW, False, "adamw", **MASTERS)
    losses, state, _ = train(pipe)
    of_stages = moments(pipe)
    for rank, (its_losses, its_state, _, (its_moments,)) in enumerate(run_ranks(with_masters, 4)):
        assert_close(its_losses, losses if rank > 1 else [], rtol=2**-7, atol=0)
        for key, its in its_state.items():
            assert_close(its, state[key], rtol=2**-7, atol=0.02, msg=key)
        both = zip(its_moments, of_stages[rank // 2], strict=True)
        norms_and_biases = [(its, one) for its, one in both if its.shape == one.shape]
        assert len(norms_and_biases) > 4
        for its, one in norms_and_biases:
            assert (its - one).norm() < 0.1 * one.norm()


def averaged(rank, ranks):
    """Average two replicas of a stage, each of two shards, and two of a whole stage."""
    mesh = mesh_of(dp=2, pp=1, tp=2)
    found = []
    for part in (mesh, mesh["dp", "pp"]):
        pipe = on_mesh(part, "vanilla", count=1, averaging=st.averaging.Elastic(0.3))
        found.append(train(pipe))
    return found


def test_averaged_replicas_of_shards():
    for on_shards, on_whole_stages in run_ranks(averaged, 4):
        assert_close(on_shards, on_whole_stages, **CLOSE)


def look(rank, ranks):
    """Read the true weights in the loop of a run, and change them there."""
    pipe = on_mesh(mesh_of(pp=2, tp=2), "spectrain", sequence=True)
    for _ in pipe.run(data_of(pipe)):
        with pipe.weights():
            true = whole_state(pipe)
    same(true, whole_state(pipe), "after the last update")
    run = pipe.run(data_of(pipe))
    next(run)
    sharded = next(p for p in pipe.parameters() if hasattr(p, "full_tensor"))
    changed = pytest.raises(RuntimeError, match="was changed in place")
    with changed, pipe.weights(), torch.no_grad():
        sharded.mul_(1.0)
    run.close()


def test_true_weights_in_the_loop():
    run_ranks(look, 4)


def with_zero(rank, ranks):
    """Train shards with optimizer state that replicas divide among them, and with all of it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to import

    mesh, found = mesh_of(dp=2, pp=1, tp=2), []
    more = {"optimizer_class": torch.optim.AdamW, "process_group": mesh["dp"].get_group()}
    divided = partial(ZeroRedundancyOptimizer, lr=2e-3, **more)
    (stage,) = mesh_programs.stages(count=1)
    for optimizer in (divided, "torch"):
        pipe = make_of(parallelize(copy.deepcopy(stage), mesh["tp"], True), mesh, optimizer)
        found.append(train(pipe, 2))
    return found


def test_optimizer_state_of_shards_divided_over_replicas():
    expected = train(in_one("auto", optimizer="torch", count=1), 2)
    for divided, alone in run_ranks(with_zero, 4):
        same(divided, alone, "ZeRO-1")
        assert_close(alone, expected, **CLOSE)


# Checkpoints: whole tensors under the model's names, from any mesh into any other


def save_and_resume(rank, ranks, path):
    """Train and save; resume in another pipeline from the checkpoint in the middle."""
    mesh = mesh_of(pp=2, tp=2)

    def manager():
        pipe = on_mesh(mesh, "spectrain", DROPS, True, "adamw", scheduler=steps)
        return CheckpointManager(path, pipe, every_minibatches=3)

    whole = manager()
    first = [result.loss.item() for result in whole.run(data_of(whole.pipe, 6)) if result.has_loss]
    shutil.rmtree(f"{path}/minibatch-00000006") if rank == 0 else None
    dist.barrier()
    resumed = manager()
    assert resumed.restore().random
    rest = batches(6)[3:] if rank == 0 else None
    again = [result.loss.item() for result in resumed.run(rest) if result.has_loss]
    assert first[3:] == again
    same(whole_state(resumed.pipe), whole_state(whole.pipe), "weights")
    fail_in_one(rank, path, resumed)
    same(whole_state(resumed.pipe), whole_state(whole.pipe), "weights after failures")
    return whole_state(whole.pipe)


class Failing:
    """A sampler that cannot be saved, or not be loaded, on one rank."""

    def __init__(self, fails):
        self.fails = fails

    def state_dict(self):
        if self.fails == "save":
            raise KeyError("mine")
        return {}

    def load_state_dict(self, state):
        if self.fails == "load":
            raise KeyError("mine")


def fail_in_one(rank, path, manager):
    """What fails in one rank is raised in all, soon, and the pipeline can go on."""
    pipe, began = manager.pipe, time.monotonic()
    with pytest.raises(FileExistsError, match="00000003 exists; overwrite=True replaces it"):
        st.checkpoint.save(f"{path}/minibatch-00000003", pipe)
    st.checkpoint.save(f"{path}/other", pipe, sampler=Failing(""))
    for failing in (0, 1, 3):
        mine = rank == failing
        with pytest.raises(KeyError if mine else RuntimeError, match="mine"):
            st.checkpoint.save(f"{path}/none", pipe, sampler=Failing("save" if mine else ""))
        with pytest.raises(ValueError if mine else RuntimeError, match="trainable_only: expected"):
            st.checkpoint.save(f"{path}/none", pipe, trainable_only="no" if mine else False)
        before = whole_state(pipe)
        with torch.no_grad():
            for p in pipe.parameters():
                p.add_(1)
        changed = whole_state(pipe)
        with pytest.raises(st.CheckpointError, match="does not fit the sampler: 'mine'"):
            st.checkpoint.load(f"{path}/other", pipe, sampler=Failing("load" if mine else ""))
        same(whole_state(pipe), changed, "undone in all ranks")
        st.checkpoint.load(f"{path}/other", pipe)
        same(whole_state(pipe), before, "weights")
    optimizer = pipe.optimizers[0]
    state, optimizer.state = optimizer.state, {} if rank == 1 else optimizer.state
    match = "ranks 0 and 1 share stage 0, and 'optimizer.state.0.weight.exp_avg' has the shape"
    with pytest.raises(ValueError, match=match):
        st.checkpoint.save(f"{path}/none", pipe)
    optimizer.state = state
    with pytest.raises(ZeroDivisionError if rank == 2 else RuntimeError, match="by zero"):
        list(manager.run(data_of(pipe, 3), extra=lambda: 1 / (rank - 2)))
    manager.restore()
    assert time.monotonic() - began < 25, "of 30 seconds that one rank waits for another"


def load_elsewhere(rank, ranks, path, again):
    """Load into a stage of four shards, and into replicas; save what another loads again."""
    found = []
    for n, dims in enumerate(({"pp": 1, "tp": 4}, {"pp": 2, "dp": 2})):
        more = {"count": dims["pp"], "scheduler": steps}
        pipe = on_mesh(mesh_of(**dims), "spectrain", DROPS, False, "adamw", **more)
        assert st.checkpoint.load(path, pipe).minibatches == 6
        st.checkpoint.save(f"{again}/{n}", pipe, minibatches=6)
        found.append(whole_state(pipe))
    return found


def empty_shards(rank, ranks, path):
    """Five rows over four ranks: 2, 2, 1 and none."""
    mesh = mesh_of(pp=1, tp=4)

    def pipeline(seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 5) for _ in range(4)]
        columns = ColwiseParallel(use_local_output=False)  # whose local shape would not tell 5
        plan = {f"{k}": RowwiseParallel() if k % 2 else columns for k in range(4)}
        stage = parallelize_module(nn.Sequential(*layers), mesh["tp"], plan)
        optimizer = mesh_programs.OPTIMIZERS["adamw"]
        return st.DistributedPipeline(stage, optimizer, nn.functional.mse_loss, group=mesh)

    one, other = pipeline(0), pipeline(1)
    assert (0 in next(one.parameters()).to_local().shape) == (rank == 3)
    data = [(torch.ones(4, 5), torch.zeros(4, 5))] * 2
    list(one.run(data if rank == 0 else None))
    st.checkpoint.save(f"{path}/empty", one)
    st.checkpoint.load(f"{path}/empty", other)
    same(whole_state(other), whole_state(one), "empty shards")
    for pipe in (one, other):
        list(pipe.run(data if rank == 0 else None))
    same(whole_state(other), whole_state(one), "empty shards, trained on")


def test_a_mesh_with_empty_shards_loads_what_it_saved(tmp_path):
    run_ranks(empty_shards, 4, str(tmp_path))


def test_checkpoints_fit_into_other_meshes_and_the_model(tmp_path):
    torch.set_num_threads(1)
    state = {k: v for part in run_ranks(save_and_resume, 4, str(tmp_path)) for k, v in part.items()}
    path = tmp_path / "minibatch-00000006"
    sizes = sorted(file.stat().st_size for file in path.glob("model-*"))
    assert len(sizes) == 4 and sizes[-1] < 0.4 * sum(sizes)  # nobody wrote a whole stage
    of_ranks = run_ranks(load_elsewhere, 4, str(path), str(tmp_path))
    for one_stage, replicas in of_ranks:
        same(one_stage, state, "one stage")
        same(replicas, {key: state[key] for key in replicas}, "replicas")
    (model,), moments = mesh_programs.stages(dropout=0.2, count=1), []
    for saved in (path, tmp_path / "0", tmp_path / "1"):
        pipe = in_one("spectrain", DROPS, False, "adamw")
        st.checkpoint.load(saved, pipe)
        same(whole_state(pipe), state, str(saved))
        moments.append([each.state_dict()["state"] for each in pipe.optimizers])
        same(moments[-1], moments[0], str(saved))
        pipe.release()
        st.checkpoint.load(saved, model, only_model=True)
        same(dict(model.state_dict()), state, "a plain module")


# A rank that fails inside its stage, where another one waits for it


def fail(rank, ranks, fault, where, culprit):
    pp = ranks // 2
    pipe = on_mesh(mesh_of(pp=pp, tp=2), "auto", sequence=True, count=pp, timeout=timeout_of(fault))
    turns = count()

    def hook(*_):
        if rank == culprit and next(turns) == 5:
            commit(fault)

    part = next(m for m in pipe.modules() if isinstance(m, mesh_programs.Mlp))
    part.register_forward_hook(hook) if where == "forward" else part.up.weight.register_hook(hook)
    list(pipe.run(data_of(pipe, 20)))


@pytest.mark.parametrize(
    ("ranks", "culprit", "fault", "where"),
    [
        *((4, 3, "kill", "forward"), (4, 3, "exception", "backward"), (4, 3, "hang", "forward")),
        # with one stage, ranks wait for one another inside it alone
        *((4, 3, "stop", "backward"), (2, 1, "hang", "backward"), (2, 0, "stop", "forward")),
    ],
)
def test_a_rank_that_fails_inside_its_stage(ranks, culprit, fault, where):
    began = monotonic()
    # A stopped one keeps the store, if it is the first.
    program = Ranks(fail, ranks, fault, where, culprit, keeper=culprit > 0)
    ends = program.join(but=(culprit,) if fault == "stop" else ())
    told = printed_by(ends)
    assert monotonic() - began < 60.0, told  # far less than 120 s, after which a rank has hung
    for rank, end in enumerate(ends):
        if rank != culprit:
            assert end.code == 1, told
            assert f"RankError: rank {rank}, " in end.error, told
            # What a stopped one did last may not be known.
            place = "" if fault == "stop" else f".*pp {ranks // 2 - 1}, tp 1: "
            assert re.search(f"first cause: rank {culprit}, {place}", end.error), told
    sharing = ends[2 * (culprit // 2) + 1 - culprit % 2]
    assert "waiting on a rank that computes the stage with it" in sharing.error, told


def side_by_side(rank, ranks):
    """Train two independent pipelines, of which one fails."""
    mesh = mesh_of(lane=2, pp=2)
    pipe = on_mesh(mesh["pp"], "auto", timeout=10.0)
    if rank == 3:
        next(pipe.children()).register_forward_hook(lambda *_: commit("exception"))
    return len(list(pipe.run(data_of(pipe)))), pipe.rank, pipe.ranks


def test_pipelines_of_other_ranks_go_on():
    ends = Ranks(side_by_side, 4).join()
    assert [end.code for end in ends] == [0, 0, 1, 1], printed_by(ends)
    assert [end.value for end in ends[:2]] == [(5, 0, 2), (5, 1, 2)]
    assert "RankError: rank 0, " in ends[2].error
    assert "first cause: rank 1, " in ends[2].error


# What is refused, on all ranks


def left_out(rank, ranks, branch):
    """Leave a norm out of the plan, of which each rank sees a part of the sequence."""
    mesh = mesh_of(pp=1, tp=2)
    (stage,) = mesh_programs.stages(count=1)
    if branch == "begins with zeros":  # the norm's first gradient is zero
        nn.init.zeros_(stage[1].attention.o.weight)
    parallelize(stage, mesh["tp"], True)
    norm = nn.LayerNorm(mesh_programs.WIDTH).double()
    stage[1].norm1 = LocalNorm(norm, mesh["tp"])
    pipe = make_of(stage, mesh)
    return list(pipe.run(data_of(pipe)))


class LocalNorm(nn.Module):
    def __init__(self, norm, mesh):
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x):
        return DTensor.from_local(self.norm(x.to_local()), self.mesh, [Shard(1)])


@pytest.mark.parametrize(("branch", "minibatch"), [("", 0), ("begins with zeros", 1)])
def test_a_layer_outside_the_plan_is_noticed(branch, minibatch):
    differs = r"is an ordinary tensor, and its gradient differs .* on rank 0, .* on rank 1\)"
    for rank, end in enumerate(Ranks(left_out, 2, branch).join()):
        assert end.code == 1
        place = f"minibatch {minibatch}, .*parameter '1.norm1.norm."
        assert re.search(place + ".*" + differs, end.error), (rank, end.error)


def sharded(mesh, **more):
    stage = parallelize(mesh_programs.stages(count=1)[0], mesh["tp"], False)
    return make_of(stage, mesh, **more)


def make_of(stage, group, optimizer="sgd", **more):
    optimizer = mesh_programs.OPTIMIZERS.get(optimizer, optimizer)
    settings = with_passes({"timeout": 20.0, **more})
    return st.DistributedPipeline(
        stage, optimizer, mesh_programs.loss, "auto", group=group, **settings
    )


def hidden_matrices(ps):
    return st.optim.Muon(ps, lr=0.01, hidden=[p for p in ps if p.dim() == 2])


def tied(mesh):
    stage = nn.Sequential(mesh_programs.Head(False))
    stage.cut = st.partitioning.Cut(ties={"0.out.weight": (0, "0.weight")})
    return make_of(parallelize(stage, mesh["tp"], False), mesh)


REFUSED = [
    (lambda m: sharded(m, optimizer=hidden_matrices), "a Muon, and shards of weights; it may need"),
    (lambda m: sharded(m, offload=True), "OffloadActivations: it does not move the shards"),
    (lambda m: sharded(m, replicas=2), "replicas: the mesh has 1 of every stage, got 2"),
    (tied, "stage: parameter '0.out.weight', a DTensor, is tied to another stage"),
    (
        lambda m: make_of(torch.compile(parallelize(nn.Sequential(Mlp()), m["tp"], False)), m),
        "stage: it is compiled; torch.compile cannot trace DTensors",
    ),
    (
        lambda m: make_of(parallelize(mesh_programs.stages()[0], m["tp"], False), None),
        "a DTensor, as tensor parallelism makes; parameters may be DTensors in a Distributed",
    ),
    (
        lambda m: make_of(parallelize(mesh_programs.stages()[0], m["pp"], False), m),
        "on the dimension 'tp' of the mesh that the pipeline got as group",
    ),
    (
        lambda m: make_of(mesh_programs.stages()[0], m["tp"]),
        "group: expected a mesh with a dimension 'pp', which has the stages, got ['tp']",
    ),
    (
        lambda m: make_of(
            mesh_programs.stages()[0], DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("pp", "tp"))
        ),
        "group: rank 1 is the first, and takes the batches; it must be the lowest, which is 0",
    ),
    (
        lambda m: make_of(fully_shard(nn.Sequential(Mlp()), mesh=m["tp"]), m),
        "it is sharded by fully_shard (FSDP2), which frees and gathers weights",
    ),
]


def differs(change=None, seed=0, sequence=0, **given):
    """Return a call on whose two ranks these differ: a change of the stage, a seed, arguments."""

    def make(mesh):
        rank, (stage,) = mesh["tp"].get_local_rank(), mesh_programs.stages(count=1)
        stage = parallelize(stage, mesh["tp"], rank * sequence == 1)
        if rank and change:
            change(stage)
        torch.manual_seed(rank * seed)
        return make_of(stage, mesh, **{name: pair[rank] for name, pair in given.items()})

    return make


SHARE = "stage: the ranks that share stage 0 must start from the same weights and options; "
SHARED = [
    (
        {"change": lambda stage: stage[1].norm2.bias.data.add_(1e-9)},
        "'1.norm2.bias' of rank 0 is not that of rank 1; call torch.manual_seed with the same seed "
        "on both before you make the stage, or load the same weights into both",
    ),
    (
        {"change": lambda stage: stage[1].mlp.down.bias.data.add_(1e-9)},
        "'1.mlp.down.bias' of rank 0 is not that of rank 1",
    ),
    (
        {"change": lambda stage: stage[1].attention.q.requires_grad_(False)},
        "parameter '1.attention.q.weight' is float64 [16, 16], S(0), in parameter group 0 on rank "
        "0 and float64 [16, 16], S(0), frozen on rank 1; give both the same",
    ),
    (
        {"sequence": 1},
        "parameter '1.norm1.weight' is float64 [16], in parameter group 0 on rank 0 and "
        "float64 [16], R, in parameter group 0 on rank 1",
    ),
    (
        {"optimizer": ["sgd", lambda ps: st.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01)]},
        "the optimizer's 'lr' of parameter group 0 is 0.05 on rank 0 and 0.1 on rank 1",
    ),
    (
        {"optimizer": ["adamw", "torch"]},
        "the optimizer is spectrain_ext.optim.optimizers.AdamW on rank 0",
    ),
    ({"scheduler": [None, steps]}, "the scheduler is None on rank 0 and torch.optim"),
    ({"clip_norm": [None, 0.5]}, "the argument clip_norm is None on rank 0 and 0.5 on rank 1"),
    ({"recompute": [True, False]}, "the argument recompute is True on rank 0 and False on rank 1"),
    ({"passes": [[], [st.passes.ShareLoss()]]}, "passes: rank 0 has '[]' and rank 1 has '[Share"),
    (
        {"seed": 1},
        "the random state of its cpu of rank 0 is not that of rank 1; call torch.manual_seed with "
        "the same seed on both before you make the pipeline",
    ),
]
REFUSED += [(differs(**given), SHARE * ("passes" not in given) + said) for given, said in SHARED]


def refused(rank, ranks):
    mesh, found = mesh_of(pp=1, tp=2), []
    for make, _ in REFUSED:
        with pytest.raises((TypeError, ValueError, st.RankError)) as caught:
            make(mesh)
        found.append(str(caught.value))
    return found


def test_what_is_refused():
    for found in run_ranks(refused, 2):
        for (_, expected), error in zip(REFUSED, found, strict=True):
            swapped = re.sub(r"(rank . has .*) and (rank . has .*?);", r"\2 and \1;", error)
            assert expected in error or expected in swapped, error
