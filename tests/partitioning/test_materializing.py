"""Tests models on the meta device: cut without values; each stage gets only its own."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from helpers import model_programs
from helpers.cut_models import run, sgd
from helpers.model_programs import LLAMA
from helpers.ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointError
from spectrain_ext.partitioning import cut_at

# torch caches which functions a device context affects. transformers replaces torch.linspace inside
# from_pretrained, so a cache first filled there, by an earlier test, would lack the original.
with torch.device("cpu"):
    torch.zeros(0)


def on_meta(make):
    with torch.device("meta"):
        return make()


def assert_same(stage, other):
    for found, wanted in (
        (stage.state_dict(), other.state_dict()),
        (dict(stage.named_buffers()), dict(other.named_buffers())),
    ):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def decoder(name):
    tf = pytest.importorskip("transformers")
    if name == "GPT2":  # with tied embeddings
        return model_programs.gpt2()
    if name == "Mixtral":  # its files have single experts
        config = tf.MixtralConfig(**LLAMA, num_local_experts=2)
        return tf.MixtralForCausalLM(config).to(torch.bfloat16)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))


# From files


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_a_pretrained_model_is_read_stage_by_stage(name, tmp_path):
    real = decoder(name)
    real.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = on_meta(lambda: decoder(name))
    parts = st.partition(model, 3)
    wanted = st.partition(real, 3, profile=parts.profile)
    assert parts.cut == wanted.cut
    for k in (2, 0, 1):
        st.materialize(parts.stages[k], tmp_path)
        assert_same(parts.stages[k], wanted.stages[k])
        if k == 2:
            assert all(p.is_meta for stage in parts.stages[:2] for p in stage.parameters())
    ids = torch.randint(61, (3, 7))
    for training in (False, True):
        found, output = (run([s.train(training) for s in p], ids) for p in (parts, wanted))
        assert torch.equal(found.logits, output.logits)
        assert [*map(float, parts.loss_fn(found, ids))] == [
            *map(float, wanted.loss_fn(output, ids))
        ]
    assert (name == "GPT2") == bool(parts.stages[2].cut.ties)


def test_files_of_a_model_with_a_head_of_its_own(tmp_path):
    real, model = decoder("GPT2"), on_meta(lambda: decoder("GPT2"))
    state = {name: value.detach().clone() for name, value in real.state_dict().items()}
    file, names = tmp_path / "model.safetensors", ("transformer.wte.weight", "lm_head.weight")
    save_file(state, file)
    parts = st.partition(model, 2)
    st.materialize(parts, file)
    assert torch.equal(parts.stages[1].model.lm_head.weight, state[names[0]])
    state[names[1]][0, 0] += 1
    save_file(state, file)
    model = on_meta(lambda: decoder("GPT2"))
    for whole in (model, *st.partition(model, 2)):
        with pytest.raises(CheckpointError, match=f"'{names[0]}' and '{names[1]}' are one tensor"):
            st.materialize(whole, file)
        assert all(p.is_meta for p in whole.parameters())


def test_files_of_the_model_without_its_head(tmp_path):
    real, model = decoder("Llama"), on_meta(lambda: decoder("Llama"))
    real.model.save_pretrained(tmp_path)
    parts = st.partition(model, 2)
    wanted = st.partition(real, 2, profile=parts.profile)
    st.materialize(parts.stages[0], tmp_path)
    with pytest.raises(CheckpointError, match=r"has no 'lm_head.weight', expected of shape \[61, "):
        st.materialize(parts.stages[1], tmp_path)
    assert all(p.is_meta for p in parts.stages[1].parameters())
    st.materialize(parts.stages[1], tmp_path, init=model._init_weights)
    head = parts.stages[1].model.lm_head.weight
    assert 0.01 < head.std() < 0.03
    with torch.no_grad():
        real.lm_head.weight.copy_(head)
    for stage, other in zip(parts, wanted, strict=True):
        assert_same(stage, other)


def bert():
    tf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    return tf.BertForMaskedLM(tf.BertConfig(**sizes, num_hidden_layers=2))


@pytest.mark.parametrize(
    ("make", "old"),
    [
        (lambda: decoder("Llama"), "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (lambda: decoder("Llama"), "model.rotary_emb.inv_freq"),
        (lambda: decoder("GPT2"), "transformer.h.0.attn.bias"),
        (bert, "bert.embeddings.position_ids"),
    ],
)
def test_old_files_with_buffers_that_are_saved_no_more(make, old, tmp_path):
    """transformers and stages ignore their values."""
    real = make()
    real.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {old: torch.full((1, 4), 7)}, file, metadata={"format": "pt"})
    wanted = st.partition(type(real).from_pretrained(tmp_path), 2, profile="parameters")
    parts = st.partition(on_meta(make), 2, profile=wanted.profile)
    for stage, other in zip(parts, wanted, strict=True):
        st.materialize(stage, tmp_path)
        assert_same(stage, other)

    # a checkpoint of such a model
    *path, module, name = old.split(".")
    owner = real.get_submodule(".".join(path))
    if not hasattr(owner, module):
        owner.register_module(module, nn.Module())
    owner.get_submodule(module).register_buffer(name, torch.full((1, 4), 7))
    st.checkpoint.save(tmp_path / "c", real, only_model=True)
    pipe = st.Pipeline(parts, sgd, nn.functional.mse_loss)
    st.checkpoint.load(tmp_path / "c", pipe, only_model=True)
    for stage, other in zip(parts, wanted, strict=True):
        assert_same(stage, other)


def test_what_files_of_a_pretrained_model_may_lack(tmp_path):
    real, model = decoder("Llama"), on_meta(lambda: decoder("Llama"))
    real.model.save_pretrained(tmp_path)
    model._keys_to_ignore_on_load_missing = {r"^lm_head\."}
    last = st.partition(model, 2).stages[1]
    st.materialize(last, tmp_path)
    assert 0.01 < last.model.lm_head.weight.std() < 0.03  # as the model initializes it


class Block(nn.Module):
    """A block with all kinds of tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 8)
        # It has values, because it is not saved.
        self.register_buffer("scale", torch.arange(8, device="cpu") / 7, persistent=False)

    def forward(self, x):
        return self.lstm(self.norm(self.linear(x)))[0] * self.scale


@pytest.mark.parametrize("form", ["blocks", "by hand"])
def test_a_model_of_ones_own(form, tmp_path):
    def make():
        return nn.Sequential(*(Block() for _ in range(4)))

    real = make()
    model = on_meta(make)
    x = torch.randn(6, 8)
    run([real], x)  # its statistics are now separate
    state = {
        name: t.double() if t.is_floating_point() else t for name, t in real.state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors")
    stages = cut_at(model, [1, 4]) if form == "by hand" else list(st.partition(model, 2, x))
    other = copy.deepcopy(real)
    for stage in reversed(stages):
        st.materialize(stage, tmp_path / "model.safetensors")
    for training in (True, False):
        for stage in (*stages, other):
            stage.train(training)
        assert torch.equal(run(stages, x), other(x))
    assert all(p.requires_grad and p.dtype is torch.float32 for p in stages[0].parameters())


@pytest.mark.processes
def test_over_ranks_and_back(tmp_path):
    tf = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    real = model_programs.gpt2()
    real.save_pretrained(tmp_path / "given", max_shard_size="10KB")
    args = str(tmp_path / "given"), str(tmp_path / "trained")
    found = run_ranks(model_programs.trained_from_files, 2, *args)
    parts = st.partition(real, 2, profile=st.partition(on_meta(model_programs.gpt2), 2).profile)
    pipe = st.Pipeline(parts, sgd, parts.loss_fn)
    torch.manual_seed(7)
    losses = [result.loss.item() for result in pipe.run(list(model_programs.batches())[:2])]
    for rank, (its, never) in enumerate(found):
        assert its == losses
        assert len(never) > 12
        assert ("transformer.ln_f.weight" in never) == (rank == 0)
    index = tmp_path / "trained" / "model.safetensors.index.json"
    assert index.is_file()
    pipe.release()
    assert_same(tf.GPT2LMHeadModel.from_pretrained(tmp_path / "trained"), real)


@pytest.mark.processes
def test_what_a_rank_needs_of_memory(tmp_path):
    save_file(model_programs.large().state_dict(), tmp_path / "model.safetensors")
    ((stage, reading, writing, whole),) = run_ranks(model_programs.peaks, 1, str(tmp_path))
    assert (stage, whole > 8 * stage) == (8, True)
    assert stage - 1 < reading < 2 * stage  # its own tensors, and one of the file
    assert writing < stage


# By an initializer


def test_weights_do_not_depend_on_the_cut(tmp_path):
    found = []
    for stages in (1, 2, 3):
        model = on_meta(lambda: decoder("GPT2"))
        parts = st.partition(model, stages)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        for stage in reversed(parts.stages):
            st.materialize(stage)
        assert torch.equal(torch.get_rng_state(), before)
        assert parts.stages[0].model.transformer.wte.weight is parts.stages[-1].model.lm_head.weight
        found.append({s.cut.full_name(k): v for s in parts for k, v in s.state_dict().items()})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(found[0][name], tensor) for name, tensor in other.items())
    # by the model's own rules
    assert 0.015 < found[0]["lm_head.weight"].std() < 0.025
    assert 0.004 < found[0]["transformer.h.1.mlp.c_proj.weight"].std() < 0.01


@pytest.mark.parametrize("together", [True, False])
def test_a_tied_tensor_is_initialized_as_the_earlier_stage_does(together: bool) -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(50, 16), nn.Tanh(), nn.Linear(16, 50))
        model[2].weight = model[0].weight
        return model

    first, last = st.partitioning.cut_at(on_meta(make), [1, 3])
    for stages in [[first, last]] if together else [first, last]:
        st.materialize(stages)
    assert last[1].weight is first[0].weight
    assert 0.8 < first[0].weight.std() < 1.2  # an Embedding's; a Linear's is 0.14
    assert 0 < last[1].bias.abs().max() <= 0.25


def test_modules_initialize_themselves_or_are_initialized():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.weight = nn.Parameter(torch.empty(8))

        def forward(self, x):
            return self.linear(x) * self.weight

    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Scaled())

    stages = st.partition(on_meta(make), 2, torch.randn(3, 8))
    with pytest.raises(ValueError, match=r"stage 1: parameter '.*weight' is on the meta device, "):
        st.materialize(stages)
    assert all(t.is_meta for s in stages for t in s.parameters())

    def init(module):
        if isinstance(module, Scaled):
            module.weight.data.fill_(2)  # without autograd's knowledge
        elif isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.eye(8))
            module.bias.zero_()
        elif isinstance(module, nn.BatchNorm1d):
            module.reset_parameters()

    st.materialize(stages, init=init)
    x = torch.randn(5, 8)
    torch.testing.assert_close(run(stages, x), 2 * nn.BatchNorm1d(8)(x))


# Mismatches


def _two():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.bias": None}, r"has no '1.bias', expected of shape \[4\]"),
        ({"1.bias": torch.ones(5)}, r"'1.bias' has shape \[5\], expected \[4\] for stage 1: param"),
        ({"1.bias": torch.ones(4, dtype=torch.int64)}, "'1.bias' is integer, expected floating"),
        ({"2.bias": torch.ones(5)}, r"has '2.bias' of shape \[5\], which the model has not \(1 su"),
    ],
)
def test_files_that_do_not_fit(change, message, tmp_path):
    state = {**_two().state_dict(), **change}
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, file)
    stage = st.partition(on_meta(_two), 2).stages[1]
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path))}.*{message}"):
        st.materialize(stage, tmp_path)
    assert all(p.is_meta for p in stage.parameters())
    if "2.bias" in change:
        st.materialize(stage, tmp_path, strict=False)
        assert torch.equal(stage[0].weight, state["1.weight"])


def test_folders_that_cannot_be_read(tmp_path):
    stage = st.partition(on_meta(_two), 2).stages[0]
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or model.safetensors.i"):
        st.materialize(stage, tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        st.materialize(stage, tmp_path / "missing")
    for weight_map in ('{"0.weight": "../a.safetensors"}', "[]"):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(f'{{"weight_map": {weight_map}}}')
        with pytest.raises(CheckpointError, match=re.escape(str(index))):
            st.materialize(stage, tmp_path)


def test_what_is_left_on_the_meta_device():
    class Masks(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("mask", torch.ones(4), persistent=False)

    def init(module):
        if isinstance(module, Masks):
            module.reset_parameters()
            module.mask = torch.ones(4)

    parts = st.partition(on_meta(lambda: nn.Sequential(Masks(), Masks())), 2)
    with pytest.raises(ValueError, match=r"stage 0: buffer '0.mask' is on the meta device, and no"):
        st.materialize(parts)
    st.materialize(parts.stages[0], init=init)
    assert parts.stages[0][0].mask.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"stages\[1\]: parameter '0.weight' is on the meta"):
        st.Pipeline(parts, sgd, nn.functional.mse_loss)


# Cut without values


def test_blocks_count_by_their_parameters():
    def make():
        return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 8))

    for example in ((), (torch.ones(2, 3, dtype=torch.int64),)):
        parts = st.partition(on_meta(make), 2, *example)
        assert [block.seconds for block in parts.profile.blocks] == [0, 4160e-9, 520e-9]
