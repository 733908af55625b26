"""Tests PEFT: only the adapters of an adapted model train, as in the uncut model."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.cut_models import EVEN, trains_alike
from helpers.model_programs import LLAMA, gpt2
from safetensors.torch import load_file

import spectrain_ext as st

tf = pytest.importorskip("transformers", reason="models of transformers are adapted")
peft = pytest.importorskip("peft", reason="PEFT makes the adapters")


def lora(**more):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, **more)


def adapted(name, config):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)) if name == "Llama" else gpt2()
    model = peft.get_peft_model(model, copy.deepcopy(config))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # no adapter starts at zero
                p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def batches(count):
    g = torch.Generator().manual_seed(1)
    for length in range(6, 6 + count):
        ids = torch.randint(1, 61, (4, length), generator=g)
        mask = (torch.arange(length) < length - torch.arange(4)[:, None] % 3).long()
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids}


def own_loss(model, batch):
    return model(**batch).loss


ADAPTERS = {
    "lora": lora(),
    "dora": lora(use_dora=True),
    "head": lora(modules_to_save=["lm_head"]),
    "late": lora(layers_to_transform=[3]),
    "early": lora(layers_to_transform=[0]),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_adapters_train_as_in_the_uncut_model(name, adapter, tmp_path):
    model = adapted(name, ADAPTERS[adapter])
    alone, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    differentiated = []
    second = next(m for key, m in model.named_modules() if key.endswith((".layers.1", ".h.1")))
    second.register_forward_hook(lambda *_: differentiated.append(_[-1].requires_grad))
    parts = st.partition(model, 3, profile=EVEN)
    differentiated.clear()
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    having = [any(p.requires_grad for p in stage.parameters()) for stage in parts]
    data = list(batches(5))
    pipe = trains_alike(alone, parts, data, parts.loss_fn, own_loss, method="1f1b", microbatches=1)
    found = pipe.state_dict()
    assert len(pipe.optimizers) == sum(having) == (1 if adapter in ("late", "early") else 3)
    held = {p for o in pipe.optimizers for group in o.param_groups for p in group["params"]}
    assert len(held) == len(trains)

    # nothing before a late adapter needs the gradient
    assert differentiated == [adapter != "late"] * 5
    assert all(torch.equal(found[key], before[key]) for key in found.keys() - trains)
    assert not any(torch.equal(found[key], before[key]) for key in trains)

    model.save_pretrained(tmp_path)
    saved = peft.get_peft_model_state_dict(alone)
    base = model.get_base_model()
    again = peft.PeftModel.from_pretrained(type(base)(base.config), tmp_path)
    loaded = peft.get_peft_model_state_dict(again)
    assert set(loaded) == set(saved)
    for key, value in saved.items():
        torch.testing.assert_close(loaded[key], value, msg=key)
    pipe.release()
    merged = model.eval().merge_and_unload().state_dict()
    for key, value in alone.eval().merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[key], value, msg=key)


def test_virtual_tokens_are_refused():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PromptTuningConfig puts virtual tokens before"):
        st.partition(peft.get_peft_model(model, config), 2)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_checkpoint_of_the_adapters(name, tmp_path):
    """It resumes in other stages, and loads into an uncut model with its optimizer."""

    def made(n, scale=1.0):
        model = adapted(name, lora(init_lora_weights=False))
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.mul_(scale)
        parts = st.partition(model, n, profile=EVEN)
        return model, st.Pipeline(
            parts, lambda p: st.optim.AdamW(p, lr=0.01), parts.loss_fn, "1f1b", microbatches=1
        )

    data = list(batches(4))
    (_, pipe), (_, other) = made(3), made(2, scale=0.0)
    list(pipe.run(data[:2]))
    st.checkpoint.save(tmp_path / "c", pipe, trainable_only=True)
    held = load_file(tmp_path / "c" / "model.safetensors")
    assert held.keys() == {key for key in pipe.state_dict() if "lora_" in key}
    st.checkpoint.load(tmp_path / "c", other)
    alone = adapted(name, lora(init_lora_weights=False))
    trained = [p for p in alone.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0)
    st.checkpoint.load(tmp_path / "c", alone, optimizer=optimizer)
    losses = [[result.loss.item() for result in each.run(data[2:])] for each in (pipe, other)]
    assert losses[0] == losses[1]
    for batch, loss in zip(data[2:], losses[0], strict=True):
        found = own_loss(alone, batch)
        assert found.item() == pytest.approx(loss, rel=1e-5)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    # the base has other shapes, or none of these names
    alone.resize_token_embeddings(60)
    with pytest.raises(st.CheckpointError, match=r"another base: 'base_model\S+' has shape \[61, "):
        st.checkpoint.load(tmp_path / "c", alone)
    with pytest.raises(st.CheckpointError, match=r"has no '\S+\.weight', which stage 0 has"):
        st.checkpoint.load(tmp_path / "c", alone.unload())
