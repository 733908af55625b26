"""Tests pipelines on device meshes: with tensor-parallel stages, replicas, and side by side."""

from __future__ import annotations

import copy
import re
import shutil
from functools import partial
from itertools import count

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
from torch.distributed.tensor.parallel import loss_parallel
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
    return train(pipe)


NARROW, MASTERS = {"dtype": torch.bfloat16}, {"master_dtype": torch.float32, "clip_norm": 0.3}


def test_masters_of_16_bits():
    """Sums over shards are rounded to 16 bits, so a loss may differ by a unit in the last place."""
    losses, state, _ = train(in_one("auto", NARROW, False, "adamw", **MASTERS))
    for rank, (its_losses, its_state, _) in enumerate(run_ranks(with_masters, 4)):
        assert_close(its_losses, losses if rank > 1 else [], rtol=2**-7, atol=0)
        for key, its in its_state.items():
            assert_close(its, state[key], rtol=2**-7, atol=0.02, msg=key)


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
    for divided, alone in run_ranks(with_zero, 4):
        same(divided, alone, "ZeRO-1")


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
    return whole_state(whole.pipe)


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


def fail(rank, ranks, fault, where):
    pipe = on_mesh(mesh_of(pp=2, tp=2), "auto", sequence=True, timeout=timeout_of(fault))
    turns = count()

    def hook(*_):
        if rank == 3 and next(turns) == 5:
            commit(fault)

    part = next(m for m in pipe.modules() if isinstance(m, mesh_programs.Mlp))
    part.register_forward_hook(hook) if where == "forward" else part.up.weight.register_hook(hook)
    list(pipe.run(data_of(pipe, 20)))


@pytest.mark.parametrize(
    ("fault", "where"),
    [("kill", "forward"), ("exception", "backward"), ("hang", "forward"), ("stop", "backward")],
)
def test_a_rank_that_fails_inside_its_stage(fault, where):
    ends = Ranks(fail, 4, fault, where).join(but=(3,) if fault == "stop" else ())
    told = printed_by(ends)
    for rank, end in enumerate(ends[:3]):
        assert end.code == 1, told
        assert f"RankError: rank {rank}, " in end.error, told
        # What a stopped one did last may not be known.
        place = "" if fault == "stop" else ".*pp 1, tp 1: "
        assert re.search(f"first cause: rank 3, {place}", end.error), told
    assert "waiting on a rank that computes the stage with it" in ends[2].error, told


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


def left_out(rank, ranks):
    """Leave a norm out of the plan, of which each rank sees a part of the sequence."""
    mesh = mesh_of(pp=1, tp=2)
    (stage,) = mesh_programs.stages(count=1)
    parallelize(stage, mesh["tp"], True)
    norm = nn.LayerNorm(mesh_programs.WIDTH).double()
    stage[1].norm1 = LocalNorm(norm, mesh["tp"])
    return list(make_of(stage, mesh).run(data_of(None)))


class LocalNorm(nn.Module):
    def __init__(self, norm, mesh):
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x):
        return DTensor.from_local(self.norm(x.to_local()), self.mesh, [Shard(1)])


def test_a_layer_outside_the_plan_is_noticed():
    for rank, end in enumerate(Ranks(left_out, 2).join()):
        assert end.code == 1
        assert "parameter '1.norm1.norm." in end.error, (rank, end.error)
        assert "is an ordinary tensor, and its gradient differs" in end.error


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
    stage.tied_parameters = {"0.out.weight": (0, "0.weight")}
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


def refused(rank, ranks):
    mesh, found = mesh_of(pp=1, tp=2), []
    for make, _ in REFUSED:
        with pytest.raises((TypeError, ValueError)) as caught:
            make(mesh)
        found.append(str(caught.value))
    return found


def test_what_is_refused():
    for found in run_ranks(refused, 2):
        for (_, expected), error in zip(REFUSED, found, strict=True):
            assert expected in error
