"""Tests forged checkpoints: rejected before anything changes, and never executed."""

from __future__ import annotations

import pickle
import resource

import pytest
import torch
from helpers.checkpoint_cases import batches, everything, pipeline, same, train
from helpers.forged_checkpoints import Evil, data_file, forge, grow, nest, put, refused

from spectrain_ext.checkpoint import ShuffledSampler, documents, load, save
from spectrain_ext.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):
    pipe = pipeline(2)
    train(pipe, batches(3))
    save(tmp_path / "c", pipe, minibatches=3)
    return tmp_path / "c"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_pickle_in_place_of_a_file_of_tensors_is_refused(tmp_path, saved, zipped):
    trace = tmp_path / "executed"
    path = data_file(saved)
    if zipped:
        torch.save(Evil(trace), path)
    else:
        path.write_bytes(pickle.dumps(Evil(trace)))
    forge(saved, lambda body: body["files"].update({path.name: path.stat().st_size}))
    refused(saved, r"model\.safetensors: damaged, ")
    assert not trace.exists()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 5), torch.zeros(16), torch.zeros(4, 4).double(), torch.zeros(4, 4, 2)],
    ids=["shape", "flat", "dtype", "pairs"],
)
def test_something_else_than_the_tensor(saved, tensor):
    put(saved, {"0.linear.weight": tensor})
    refused(saved, r"holds something else than the tensor 'model\.0\.linear\.weight'")


@pytest.mark.parametrize("which", ["unused", "weight", "state", "generator"])
def test_a_small_file_that_claims_much_costs_little_memory(saved, which):
    size, name = 1 << 29, "0.linear.weight" if which == "weight" else "more"
    path = data_file(saved, "model" if which == "weight" else "state")
    grow(path, name, size)
    entry = {"dtype": "uint8", "shape": [size], "file": path.name, "sha256": "0" * 64}

    def change(body):
        body["files"][path.name] = path.stat().st_size
        if which != "weight":
            body["tensors"][name] = entry
        if which == "state":
            body["stages"][0]["optimizer"]["state"]["other"] = {"state": {"$tensor": name}}
        if which == "generator":
            body["processes"][0]["random"]["cuda9"] = {"$tensor": name}

    forge(saved, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    match = {
        "unused": r"checkpoint\.json: tensors: nothing uses 'more'",
        "weight": r"holds something else than the tensor 'model\.0\.linear\.weight'",
    }
    refused(saved, match.get(which, "damaged, the SHA-256 of 'more' is not what was saved"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < size >> 12  # KiB


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [True, False], "01", [0, 1, 2], {}])
def test_an_order_of_strides_that_is_none(saved, order):
    forge(saved, lambda body: body["tensors"]["model.0.linear.weight"].update(order=order))
    refused(saved, r"tensors\['model\.0\.linear\.weight'\]: bad file, shape or order")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12, dtype=torch.bfloat16)[2:8:2],
        torch.tensor(1 + 2j),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.tensor([1, 2, 65535], dtype=torch.uint16),
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.zeros(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_every_tensor_is_read_as_torch_reads_it(tmp_path, tensor):
    def module(value):
        found = torch.nn.Module()
        found.register_buffer("it", value)
        return found

    save(tmp_path / "c", module(tensor))
    loaded = module(torch.zeros_like(tensor))
    load(tmp_path / "c", loaded)
    assert torch.equal(loaded.it, tensor)


def test_state_of_another_shape_than_its_parameter(saved):
    key = "optimizer.state.0.linear.bias.momentum_buffer"
    for shape in ([2, 2], [1], []):
        forge(saved, lambda body, shape=shape: body["tensors"][key].update(shape=shape))
        shown = str(shape).replace("[", r"\[").replace("]", r"\]")
        refused(saved, rf"'{key}' has shape {shown}, expected \[4\]")
    forge(saved, lambda body: body["tensors"][key].update(shape=[2**40]))
    refused(saved, rf"'{key}' has shape \[1099511627776\], expected \[4\]")


@pytest.mark.parametrize(
    ("key", "dtype", "match"),
    [
        ("model.0.linear.weight", "complex64", "is complex64, which does not fit into float32"),
        ("model.0.linear.weight", "int32", "is int32, which does not fit into float32"),
        ("model.0.norm.num_batches_tracked", "float64", "float64, which does not fit into int64"),
        ("model.0.norm.num_batches_tracked", "bool", "is bool, which does not fit into int64"),
        ("optimizer.state.0.linear.bias.momentum_buffer", "complex32", "has no imaginary part"),
        ("optimizer.state.0.linear.bias.momentum_buffer", "qint8", "'qint8' is no dtype"),
        ("model.0.linear.weight", "qint32", "'qint32' is no dtype"),
    ],
)
def test_numbers_of_another_kind(saved, key, dtype, match):
    forge(saved, lambda body: body["tensors"][key].update(dtype=dtype))
    refused(saved, match)


def test_a_complex_weight_does_not_lose_its_imaginary_part(tmp_path):
    saved = torch.nn.Linear(2, 2).to(torch.complex64)
    save(tmp_path / "c", saved)
    real = torch.nn.Linear(2, 2)
    before = real.weight.clone()
    with pytest.raises(CheckpointError, match="'weight' is complex64"):
        load(tmp_path / "c", real)
    assert torch.equal(real.weight, before)
    save(tmp_path / "d", real.double())
    load(tmp_path / "d", torch.nn.Linear(2, 2))  # a float is valid


DEEP = '{"sha256": "", "checkpoint": ' + 10**5 * "[" + 10**5 * "]" + "}"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "it is no checkpoint document"),
        (b"[]", "it is no checkpoint document"),
        (b"null", "it is no checkpoint document"),
        (b'{"checkpoint": [], "sha256": 3}', "it is no checkpoint document"),
        (b'{"checkpoint": {"format": NaN, "version": 1}, "sha256": ""}', "expected the format"),
        (b'{"checkpoint": {"format": [[[[[[[[1]]]]]]]], "version": 1}, "sha256": 0}', "the format"),
        (b'{"checkpoint": {}, "checkpoint": {}}', "a key is there twice"),
        (b'{"checkpoint": ' + b"9" * 10**5 + b"}", "it is no checkpoint document"),
        (b"\xff\xfe\xfd", "it is no checkpoint document"),
        (b"\xef\xbb", "it is no checkpoint document"),
        (DEEP.encode(), "it is no checkpoint document"),
        (b"[" * 10**5, "it is no checkpoint document"),
    ],
    ids=range(12),
)
def test_what_is_no_document(saved, content, match):
    (saved / documents.NAME).write_bytes(content)
    refused(saved, rf"checkpoint\.json: .*{match}")


@pytest.mark.parametrize(
    "value",
    [
        {"$tuple": 3},
        {"$dict": [3]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$counter": {}},
        {"$scalar": ["float32", "x"]},
        {"$scalar": ["float32", [1, 2]]},
        {"$scalar": ["int8", 1000]},
        {"$scalar": ["int64", 2**70]},
        {"$scalar": ["_dynamo", 1]},
        {"$scalar": [["float32"], 1]},
        {"$other": []},
        {"$tuple": [], "more": 1},
        nest(1, 101),
        {"a": nest({"$tuple": [nest(1, 60)]}, 60)},
    ],
    ids=range(16),
)
def test_values_that_no_save_writes(saved, value):
    """Otherwise an extra value would be noticed only after the weights have been replaced."""
    for place in ("extra", "sampler", "scheduler", "options", "state"):
        original = (saved / documents.NAME).read_bytes()

        def change(body, place=place):
            if place == "extra":
                body["extra"] = value
            elif place == "sampler":
                body["processes"][0]["sampler"] = value
            elif place == "scheduler":
                body["stages"][0]["scheduler"] = value
            elif place == "options":
                body["stages"][1]["optimizer"]["groups"][0]["options"]["lr"] = value
            else:
                body["stages"][1]["optimizer"]["state"]["3.norm.bias"]["a"] = value

        forge(saved, change)
        more = {"sampler": ShuffledSampler(10, 3)} if place == "sampler" else {}
        refused(saved, r"checkpoint\.json: ", **more)
        (saved / documents.NAME).write_bytes(original)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.update(extra=nest(1, 50), minibatches=True),
        lambda b: b.update(minibatches=-1),
        lambda b: b.update(training={"minibatches": -1, "phase": 0}),
        lambda b: b.update(processes=[]),
        lambda b: b["processes"][0].update(random=[3]),
        lambda b: b["stages"][0].update(parameters=[["0.linear.weight"]]),
        lambda b: b["stages"][0].update(random=[{}]),
        lambda b: b["stages"][0].update(stage=True),
        lambda b: b["files"].update({"": 0}),
        lambda b: b["files"].update({"..": 0}),
        lambda b: b["files"].update({"model.safetensors\0": 0}),
        lambda b: b["files"].update({"state-00001-of-00002.safetensors": 0.5}),
        lambda b: b["tensors"]["model.0.linear.bias"].update(file="state.safetensors"),
        lambda b: b["tensors"]["model.0.linear.bias"].update(file=3),
        lambda b: b["tensors"]["model.0.linear.bias"].update(sha256=True),
        lambda b: b["tensors"]["model.0.linear.bias"].update(shape=[4.0]),
        lambda b: b["tensors"]["model.0.linear.bias"].update(shape=[10**30]),
        lambda b: b["tensors"]["model.0.linear.bias"].update(shape=[1] * 100),
        lambda b: b["tensors"]["model.0.linear.bias"].update(dtype="_dynamo"),
        lambda b: b["tensors"].update({"\x1b[31m": []}),
        lambda b: b["stages"][0]["weights"].update(more={"$tensor": "none"}),
        lambda b: b["stages"][0].pop("optimizer"),
        lambda b: b["stages"][0]["optimizer"].update({"class": ["SGD"]}),
        lambda b: b["stages"][0]["optimizer"]["groups"][0].update(params=[["0.linear.weight"]]),
        lambda b: b["stages"][0]["optimizer"].update(state={"0.linear.weight": 3}),
        lambda b: b["stages"][0]["optimizer"]["groups"][0]["options"].update(lr="fast"),
        lambda b: b["stages"][0]["optimizer"]["groups"][0]["options"].update(lr=[1]),
        lambda b: b["stages"][0]["optimizer"]["groups"][0]["options"].update(lr=float("nan")),
        lambda b: b["stages"][0]["optimizer"]["groups"][0]["options"].update(initial_lr="x"),
        lambda b: b["stages"][0]["optimizer"].update(
            state={"0.linear.weight": {"momentum_buffer": 3}}
        ),
        lambda b: b["stages"][0].update(scheduler=[1]),
        lambda b: b["stages"][0].update(scheduler={"step": 3}),
        lambda b: b["stages"][0].update(scheduler={"optimizer": 3}),
        lambda b: b["stages"][0]["scheduler"].update(milestones=3),
        lambda b: b["stages"][0]["scheduler"].update({"$dict": []}),
    ],
    ids=range(35),
)
def test_more_forged_documents(saved, change):
    forge(saved, change)
    refused(saved, ".")


def test_a_failure_of_the_last_part_is_undone(saved, monkeypatch):
    """A module's own hook raises after the weights of the first stage are in place."""
    pipe = pipeline(2, seed=3)
    train(pipe, batches(2))
    before = {key: tensor.clone() for key, tensor in everything(pipe).items()}
    rates = [scheduler.state_dict() for scheduler in pipe.schedulers]

    def refuse(*_):
        raise KeyError("not mine")

    last = list(pipe.children())[-1]
    last.register_load_state_dict_post_hook(refuse)
    with pytest.raises(CheckpointError, match="does not fit stage 1: 'not mine'"):
        load(saved, pipe)
    same(everything(pipe), before)
    assert [scheduler.state_dict() for scheduler in pipe.schedulers] == rates
