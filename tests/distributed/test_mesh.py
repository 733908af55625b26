"""Tests pipelines on device meshes: with tensor-parallel stages, replicas, and side by side."""

from __future__ import annotations

import pytest
import torch
from helpers import mesh_programs
from helpers.mesh_programs import CLOSE, data_of, in_one, mesh_of, on_mesh, whole_state
from helpers.rank_cases import same
from helpers.ranks import run_ranks
from torch.testing import assert_close

import spectrain_ext as st

pytestmark = pytest.mark.processes

LLAMA, DROPS = {"llama": True}, {"dropout": 0.2}

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


def train(pipe, *count):
    """Return the losses that are known here, the whole state, and an evaluation after it."""
    losses = [r.loss.item() for r in pipe.run(data_of(pipe, *count)) if r.has_loss]
    return losses, whole_state(pipe), pipe.evaluate(data_of(pipe, 1))["loss"]


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



# On two nodes of two GPUs each, so to say: data, pipeline and tensor parallelism in eight processes.

APART = {"microbatches": 4, "clip_norm": 0.3}  # with as many per replica as stages
TOGETHER = [(method, model) for method in ("1f1b", "auto", "spectrain") for model in ({}, LLAMA)]


def three_kinds(rank, ranks):
    """Train on the whole mesh, and of whole stages on the parts of it without tensor parallelism."""
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
