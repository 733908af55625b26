"""Tests Hugging Face decoders in stages: the uncut model's logits, losses and gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cut_models import EVEN, run, sgd, trains_alike
from helpers.model_programs import GPT2, LLAMA
from torch import Tensor, nn

import spectrain_ext as st

tf = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "hidden_size": 16, "tie_word_embeddings": False}
SMALL = {**LLAMA, **SIZES}
HEADS = {"num_hidden_layers": 4, "num_attention_heads": 2}
PLACES = {"max_position_embeddings": 32}
NO_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

#: The package's name of a model, and the requirements of its config.
MODELS = {
    "Llama": SMALL,
    "Mistral": {**SMALL, "sliding_window": 3},
    "Gemma2": {**SMALL, "head_dim": 8, "sliding_window": 3, "final_logit_softcapping": 0.2},
    "Mixtral": {**SMALL, "num_local_experts": 2},
    "GPT2": {**GPT2, **NO_DROPS, "tie_word_embeddings": False, "pad_token_id": 0},
    "OPT": {**SIZES, **HEADS, **PLACES, "ffn_dim": 24, "word_embed_proj_dim": 8},
    "Bloom": {**SIZES, "n_layer": 4, "n_head": 2},
}


def made(name: str, head: str = "ForCausalLM", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(**{**MODELS[name], **more})
    model = getattr(tf, name + ("LMHeadModel" if name == "GPT2" else head))(config)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases too: no value is neutral
            p.add_(torch.randn_like(p) * 0.1)
    return model


def batch(
    samples: int, length: int, mask: str | None = None, positions: bool = False
) -> dict[str, Tensor]:
    ids = torch.randint(1, 61, (samples, length))
    labels = ids.clone()
    found = {"input_ids": ids}
    if mask is not None:
        pads = torch.arange(samples)[:, None] % 3
        place = torch.arange(length)[None]
        kept = place >= pads if mask == "left" else place < length - pads
        ids[~kept] = 0
        labels[~kept] = -100
        found["attention_mask"] = kept.long()
    if positions:
        found["position_ids"] = torch.arange(2, length + 2).repeat(samples, 1)
    return {**found, "labels": labels}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def loss_of(parts: Any, output: Any, given: Any) -> Tensor:
    """Return the model's loss; a mean comes as a sum and a count."""
    found = parts.loss_fn(output, given)
    return found[0] / found[1] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_the_models(name):
    model = made(name).eval()
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, profile=EVEN)
    assert parts.cut.ends == (2, 4, 6)
    for given in (
        batch(2, 7),
        batch(3, 9, "left"),
        batch(4, 6, "right"),
        batch(1, 5, positions=name not in ("Bloom",)),
    ):
        found = run(parts, given)
        expected = alone(**given, use_cache=False)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
        loss = loss_of(parts, found, given)
        torch.testing.assert_close(loss, expected.loss, rtol=0, atol=0)
        loss.backward()
        expected.loss.backward()
    names = {s.cut.full_name(key): p for s in parts for key, p in s.named_parameters()}
    assert names == dict(model.named_parameters())
    for key, p in alone.named_parameters():
        torch.testing.assert_close(names[key].grad, p.grad, msg=key)


def test_what_goes_from_stage_to_stage():
    """The hidden state and the batch's columns that the model takes."""
    first = st.partition(made("Llama"), 3, profile=EVEN).stages[0]
    ids = torch.randint(1, 61, (2, 5))
    assert [t.shape for t in first({"input_ids": ids, "labels": ids})] == [(2, 5, 16), (2, 5)]
    sent = first({"position_ids": ids, "input_ids": ids})
    assert [t.numel() for t in sent] == [160, 10, 0, 10]  # without a mask


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_training_in_a_pipeline_is_the_models(name: str, tied: bool, tmp_path: Path) -> None:
    model = made(name, tie_word_embeddings=tied).train()
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, profile=EVEN)
    assert len(parts.stages[2].cut.ties) == tied
    data = [batch(4, 7), batch(4, 8, "right"), batch(3, 6, "left"), batch(1, 9)]
    pipe = trains_alike(alone, parts, data, parts.loss_fn, own_loss)
    model.load_state_dict(pipe.state_dict())
    generates = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(1, 7).view(2, 3)
    found, expected = (each.eval().generate(ids, **generates) for each in (model, alone))
    assert torch.equal(found, expected)
    for _ in pipe.train().run(data):  # after other calls of the model
        with pytest.raises(RuntimeError, match="take the pipeline's own state_dict"):
            model.save_pretrained(tmp_path)
    pipe.release()
    if tied:
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        heads = [each.get_output_embeddings().weight for each in (model, again)]
        assert heads[0] is model.get_input_embeddings().weight
        assert torch.equal(*heads)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_loss_by_tokens_is_that_of_the_whole_minibatch(name: str) -> None:
    """Padded rows, packed ones, microbatches without a label: the uncut result of ``labels=``."""
    model = made(name)
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, profile=EVEN)
    data = []
    for i in range(4):
        one = batch(6, 12, "right", positions=True)
        lengths = torch.tensor([2, 12, 5, 1, 12, 3])
        one["labels"][torch.arange(12)[None] >= lengths[:, None]] = -100
        if i == 1:
            one["labels"][2:4] = -100
        if i == 2:  # two sequences in a row
            one["position_ids"] = (torch.arange(12) % 6).repeat(6, 1)
        data.append(one)
    pipe = st.Pipeline(parts, sgd, parts.loss_fn, method="1f1b", clip_norm=0.1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for result, one in zip(pipe.run(data), data, strict=True):
        optimizer.zero_grad()
        loss = own_loss(alone, one)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(result.loss, loss.detach())
        assert result.count == parts.loss_fn.count(one)
    torch.testing.assert_close(dict(pipe.state_dict()), dict(alone.state_dict()))
    counts = [parts.loss_fn.count(one).item() for one in data]
    whole = sum(own_loss(alone, one).item() * n for one, n in zip(data, counts, strict=True))
    assert pipe.evaluate(data)["loss"] == pytest.approx(whole / sum(counts), rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_writes_text_and_is_saved_in_the_loop(tied: bool, tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    parts = st.partition(model, 3, profile="parameters")
    pipe = st.Pipeline(parts, lambda p: st.optim.AdamW(p, lr=0.01), parts.loss_fn)
    ids = torch.randint(1, 61, (6, 8))
    for _ in pipe.run([{"input_ids": ids, "labels": ids}] * 5):
        with pipe.weights():
            model.save_pretrained(tmp_path)
            words = model.generate(ids[:1, :3], max_new_tokens=5, do_sample=False)
        saved = tf.LlamaForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(saved.state_dict(), dict(pipe.state_dict()), rtol=0, atol=0)
        assert torch.equal(saved.generate(ids[:1, :3], max_new_tokens=5, do_sample=False), words)


def test_the_model_itself_is_left_alone():
    model = made("Llama").train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    parts = st.partition(model, 2)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert model(**batch(2, 5)).logits.isfinite().all()
    assert len(parts.profile.blocks) == 6
    assert [b.name for b in parts.profile.blocks][::5] == ["model.embed_tokens", "model.norm"]
    assert parts.profile.blocks[1].output_bytes == 32 * 16 * 4 + 32 * 8


ROUTED = {
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "num_hidden_layers": 4,
}


def aux_of_halves(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return the mean over two microbatches of transformers' loss, weighted by labels."""
    halves = [{name: t.chunk(2)[k] for name, t in given.items()} for k in range(2)]
    counts = [(half["labels"][:, 1:] != -100).sum() for half in halves]
    losses = [own_loss(model, half) * n for half, n in zip(halves, counts, strict=True)]
    return torch.stack(losses).sum() / sum(counts)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_loss_that_balances_experts(checkpointed: bool) -> None:
    """Stages hand on sums over their routers, of which the last one makes ``aux_loss``."""
    model = made("Mixtral", **ROUTED).train()
    alone = copy.deepcopy(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = st.partition(model, 3, profile=EVEN)
    sent = parts.stages[0](batch(2, 5, "left"))
    assert [tuple(t.shape) for t in sent] == [(2, 5, 16), (2, 4), (2, 5), (2, 5)]
    for given in (batch(2, 7), batch(4, 6, "right")):
        found, expected = run(parts, given), alone(**given, use_cache=False)
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)
        assert found.aux_loss.isfinite() and torch.equal(found.logits, expected.logits)
        torch.testing.assert_close(loss_of(parts, found, given), expected.loss)
    data = [batch(4, 7, mask) for mask in (None, "right", "left")]
    trains_alike(alone, parts, data, parts.loss_fn, aux_of_halves, microbatches=2)
    parts = st.partition(made("Mixtral", **{**ROUTED, "output_router_logits": False}), 3)
    assert run(parts, given).aux_loss is None


@pytest.mark.nightly
def test_a_model_that_was_compiled_in_place():
    model = made("Llama").eval()
    given = batch(2, 6, "left")
    expected = model(**given).logits
    model.compile(backend="eager")
    torch.testing.assert_close(run(st.partition(model, 3, profile=EVEN), given).logits, expected)


def test_gradient_checkpointing_stays():
    model = made("Llama").train()
    alone = copy.deepcopy(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    parts = st.partition(model, 3, profile=EVEN)
    given = batch(2, 6, "left")
    calls.clear()
    loss_of(parts, run(parts, given), given).backward()
    assert len(calls) == 8
    alone(**given).loss.backward()
    for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=key)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_layers_that_the_model_checkpoints(name):
    data = [batch(4, length, "left") for length in (6, 8, 6)]
    found = []
    for checkpointed in (False, True):
        model = made(name).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        calls = []
        for layer in model.get_submodule("model.layers" if name == "Llama" else "transformer.h"):
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        parts = st.partition(model, 3, profile=EVEN)
        torch.manual_seed(1)
        pipe = st.Pipeline(parts, sgd, parts.loss_fn, "auto", microbatches=2)
        calls.clear()
        losses = [result.loss for result in pipe.run(data)]
        found.append(([*losses, *pipe.state_dict().values()], len(calls)))
    (expected, count), (tensors, twice) = found
    assert twice == 2 * count and all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("count", [1, 3])
def test_classification_heads(head: str, count: int) -> None:
    """The class of a sequence is that of its last token, which is found from the ids."""
    model = made("Llama", head, pad_token_id=0, num_labels=count).eval()
    parts = st.partition(model, 3, profile=EVEN)
    assert model.config.problem_type is None
    for mask in ("right", "left"):
        given = batch(4, 7, mask)
        if head == "ForSequenceClassification":
            classes = torch.arange(4) % 3
            given["labels"] = classes if count == 3 else classes.float()
        else:
            given["labels"].clamp_(max=count - 1)
        found, expected = run(parts, given), model(**given)
        torch.testing.assert_close(found.logits, expected.logits)
        for labels in (given, given["labels"]):
            torch.testing.assert_close(loss_of(parts, found, labels), expected.loss)


def test_module_buffers_beside_the_blocks_are_saved_once():
    model = made("Llama").eval()
    model.model.register_buffer("seen", torch.ones(2))
    model.model.rotary_emb.register_buffer("more", torch.ones(3))
    parts = st.partition(model, 3, profile=EVEN)
    pipe = st.Pipeline(parts, sgd, parts.loss_fn)
    state = pipe.state_dict()
    assert set(state) == set(model.state_dict())
    state["model.seen"] = torch.zeros(2)
    pipe.load_state_dict(state)
    assert [stage.model.model.seen.tolist() for stage in parts] == [[0.0, 0.0]] * 3


def test_copies_of_stages_are_stages_of_their_own():
    parts = st.partition(made("Llama").eval(), 3, profile=EVEN)
    stages, others = list(parts), pickle.loads(pickle.dumps(copy.deepcopy(list(parts))))
    given = batch(2, 6, "left")
    expected = run(stages, given).logits
    with torch.no_grad():
        for p in others[0].parameters():
            p.zero_()
    assert torch.equal(run(stages, given).logits, expected)
    assert not torch.equal(run(others, given).logits, expected)
    assert torch.equal(run([stages[0], *others[1:]], given).logits, expected)


ENCODER = {**SIZES, **HEADS, **PLACES, "intermediate_size": 24, "pad_token_id": 0}
ENCODER.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)


def encoder_batch(head: str, samples: int = 4) -> dict[str, Tensor]:
    """Return a batch in which each sample has another number of labels."""
    ids = torch.randint(1, 61, (samples, 6))
    given = {"input_ids": ids, "attention_mask": (torch.rand(samples, 6) > 0.2).long()}
    labeled = torch.arange(6) < torch.randint(7, (samples, 1)).clamp(min=1)
    if head == "ForMaskedLM":
        return {**given, "labels": torch.where(labeled, ids, -100)}
    if head == "ForTokenClassification":
        return {**given, "labels": torch.where(labeled, ids % 3, -100)}
    if head == "ForSequenceClassification":
        return {**given, "labels": torch.arange(samples) % 3}
    positions = torch.arange(samples)
    return {**given, "start_positions": positions, "end_positions": positions + 1}


HEADS_OF_ENCODERS = ("MaskedLM", "TokenClassification", "SequenceClassification")


@pytest.mark.parametrize("head", [*HEADS_OF_ENCODERS, "QuestionAnswering"])
@pytest.mark.parametrize("family", ["Bert", pytest.param("Roberta", marks=pytest.mark.nightly)])
def test_encoders_train_with_their_own_losses(family: str, head: str) -> None:
    """Their forward computes the loss itself; microbatches have different numbers of labels."""
    torch.manual_seed(0)
    labels = 2 if head == "QuestionAnswering" else 3
    config = getattr(tf, f"{family}Config")(**{**ENCODER, "num_labels": labels})
    model = getattr(tf, f"{family}For{head}")(config).train()
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, encoder_batch(f"For{head}"), profile=EVEN)
    data = [encoder_batch(f"For{head}") for _ in range(3)]
    trains_alike(alone, parts, data, parts.loss_fn, own_loss, microbatches=4)
    summed = isinstance(parts.loss_fn(model(**data[0]), data[0]), tuple)
    assert summed == (head != "QuestionAnswering")


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_losses_of_encoders_that_are_no_classes(kind: str) -> None:
    config = tf.BertConfig(**ENCODER, problem_type=kind)
    model = tf.BertForSequenceClassification(config).eval()
    parts = st.partition(model, 2, profile=EVEN)
    given = {**encoder_batch("ForMaskedLM"), "labels": torch.rand(4, 3).round()}
    expected = model(**given).loss
    torch.testing.assert_close(parts.loss_fn(run(parts, given), given), expected, rtol=0, atol=0)


class Fills(tf.BertForTokenClassification):
    """Has a class for ignored labels."""

    def forward(self, input_ids=None, labels=None):
        output = super().forward(input_ids)
        if labels is not None:
            loss = nn.functional.cross_entropy
            output.loss = loss(output.logits.flatten(0, 1), labels.flatten().clamp(min=0))
        return output


class Weighs(tf.BertForSequenceClassification):
    """Weights classes, which leaves a single sample's mean as it is."""

    def forward(self, input_ids=None, labels=None):
        output = super().forward(input_ids)
        if labels is not None:
            weights = torch.tensor([1.0, 2.0, 3.0])
            output.loss = nn.functional.cross_entropy(output.logits, labels, weights)
        return output


@pytest.mark.parametrize("kind", [Fills, Weighs])
def test_a_loss_that_only_resembles_a_known_one(kind: Any) -> None:
    parts = st.partition(kind(tf.BertConfig(**ENCODER)), 2, profile=EVEN)
    with pytest.raises(ValueError, match=f"a {kind.__name__} computes its loss otherwise"):
        _ = parts.loss_fn


# Models of images and text

VISION = {**HEADS, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
VISION.update(image_size=28, patch_size=14)
#: The ids of an image, four of which stand for one, and of what is before and after it.
IMAGE, BEFORE, AFTER = 60, 61, 62


def of_images(name: str) -> Any:
    """Return a model whose encoder of images is larger than its decoder."""
    torch.manual_seed(0)
    text, more = {**SMALL, "vocab_size": 63}, {"image_token_id": IMAGE}
    more["tie_word_embeddings"] = False
    vision: dict[str, Any] = VISION
    if name.startswith("Llava"):
        text["model_type"] = "llama"
        vision = {**VISION, "model_type": "clip_vision_model"}
        more.update(image_token_index=IMAGE, image_grid_pinpoints=[[28, 28]])
    elif name == "Gemma3":
        text.update(head_dim=8, sliding_window=3)
        more.update(mm_tokens_per_image=4, boi_token_index=BEFORE, eoi_token_index=AFTER)
    else:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
        vision.update(patch_size=14, out_hidden_size=16, window_size=28)
        more.update(vision_start_token_id=BEFORE, vision_end_token_id=AFTER)
    config = getattr(tf, f"{name}Config")(text_config=text, vision_config=vision, **more)
    model = getattr(tf, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def with_images(name: str, samples: int) -> dict[str, Tensor]:
    """Return a batch with an image in each sample, and different numbers of labels."""
    ids = torch.randint(1, 59, (samples, 15))
    count = 10 if name == "LlavaNext" else 4
    ids[:, 1], ids[:, 2 : 2 + count], ids[:, 2 + count] = BEFORE, IMAGE, AFTER
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if name.startswith("Llava"):
        of_next = {"image_sizes": torch.full((samples, 2), 28)} if count > 4 else {}
        tiles = (2,) if of_next else ()
        return {**given, **of_next, "pixel_values": torch.randn(samples, *tiles, 3, 28, 28)}
    if name == "Gemma3":
        images = {"pixel_values": torch.randn(samples, 3, 28, 28)}
        return {**given, **images, "token_type_ids": (ids == IMAGE).long()}
    given["mm_token_type_ids"] = (ids == IMAGE).long()
    given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * samples)
    return {**given, "pixel_values": torch.randn(16 * samples, 3 * 2 * 14 * 14)}


@pytest.mark.parametrize(
    "name", ["Llava", "Gemma3", pytest.param("LlavaNext", marks=pytest.mark.nightly)]
)
def test_models_of_images_and_text(name: str) -> None:
    """What comes before the text's blocks is the first block; its images stay there."""
    model = of_images(name)
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, with_images(name, 2), profile=EVEN)
    given = with_images(name, 3)
    found, expected = run(parts, given), alone(**given, use_cache=False)
    assert torch.equal(found.logits, expected.logits)
    assert max(t.dim() for t in parts.stages[0](given)) == 3
    owned = [{s.cut.full_name(n) for n, _ in s.named_parameters()} for s in parts]
    assert set().union(*owned) == {n for n, _ in model.named_parameters()}
    assert sum(map(len, owned)) == len(list(model.parameters()))
    data = [with_images(name, 4) for _ in range(3)]
    trains_alike(alone, parts, data, parts.loss_fn, own_loss, microbatches=2)
    text = {"input_ids": torch.randint(1, 59, (2, 5))}
    if name == "Gemma3":
        text["token_type_ids"] = torch.zeros_like(text["input_ids"])
    assert torch.equal(run(parts, text).logits, model(**text).logits)


def test_microbatches_of_images_with_several_rows_each() -> None:
    """Of Qwen2.5-VL, whose images are rows of patches; you cut the minibatch."""
    model = of_images("Qwen2_5_VL")
    alone = copy.deepcopy(model)
    parts = st.partition(model, 3, with_images("Qwen2_5_VL", 2), profile=EVEN)
    halves = [with_images("Qwen2_5_VL", 2) for _ in range(2)]
    halves[1]["image_grid_thw"] = torch.tensor([[1, 2, 8]] * 2)
    whole = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    cut_by_us = {"pixel_values": None}
    pipe = st.Pipeline(parts, sgd, parts.loss_fn, "sync", microbatches=2, split_dim=cut_by_us)
    (result,) = pipe.run([st.Microbatches(halves)])
    loss = own_loss(alone, whole)
    loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9).step()
    torch.testing.assert_close(result.loss, loss.detach())
    named = dict(model.named_parameters())
    for name, p in alone.named_parameters():
        torch.testing.assert_close(named[name], p, msg=name)


def test_images_that_the_example_lacks() -> None:
    parts = st.partition(of_images("Llava"), 3, profile=EVEN)
    with pytest.raises(RuntimeError, match=r"'model.vision_tower', .* the example_input did not"):
        run(parts, with_images("Llava", 2))


# Image models, which are traced


def test_models_of_images() -> None:
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 4], "depths": [1, 1], "num_labels": 3}
    model = tf.ResNetForImageClassification(tf.ResNetConfig(**sizes, layer_type="basic")).train()
    alone = copy.deepcopy(model)

    def images(count: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(count, 3, 8, 8), "labels": torch.arange(count) % 3}

    parts = st.partition(model, 3, images(4), profile="parameters")
    pipe = trains_alike(alone, parts, [images(4), images(3)], parts.loss_fn, own_loss)
    alone.eval().load_state_dict(pipe.state_dict())
    x = images(2)["pixel_values"]
    for given in (x, {"pixel_values": x}):
        found = pipe.eval()(given)
        assert type(found) is type(alone(x))
        torch.testing.assert_close(found.logits, alone(x).logits)
    with pytest.raises(TypeError, match=r"batch: expected 'pixel_values', .*; got 'pixels'"):
        pipe({"pixels": x})


def texts(count: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 61, (count, length))
    mask = torch.ones_like(ids).tril(length - 2)
    added = {"idx": ids, "decoder_input_ids": ids[:, 2:]}
    return {"input_ids": ids, "attention_mask": mask, **added}


@pytest.mark.nightly
def test_an_encoder_and_decoder_is_traced() -> None:
    """The decoder reads the encoder's output."""
    torch.manual_seed(0)
    model, data = t5().eval(), [texts(3, 7), texts(2, 9), texts(1, 6)]
    alone = copy.deepcopy(model)
    point = ["decoder.block.0"]
    parts = st.partition(model, 2, data[0], split_points=point, profile="parameters")
    for given in data:
        expected = alone(**{name: given[name] for name in given if name != "idx"})
        torch.testing.assert_close(run(parts, given).logits, expected.logits)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["T5", "Bart", "Whisper"])
def test_encoders_with_decoders_train_as_the_model(name: str) -> None:
    """Cut before blocks of both lists, with the model's own loss."""
    torch.manual_seed(0)
    ids = torch.randint(3, 61, (4, 8))
    sides = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}
    sizes = {f"{side}_{key}": n for key, n in sides.items() for side in ("encoder", "decoder")}
    sizes.update(vocab_size=61, d_model=16, dropout=0.0)
    main, inputs = "input_ids", ids
    if name == "T5":
        model = t5(dropout_rate=0.0)
    elif name == "Bart":
        model = tf.BartForConditionalGeneration(tf.BartConfig(**sizes))
    else:
        sounds = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = tf.WhisperConfig(**sizes, **sounds, **ends, decoder_start_token_id=1)
        model = tf.WhisperForConditionalGeneration(config)
        main, inputs = "input_features", torch.randn(4, 8, 32)
    model.train()
    alone = copy.deepcopy(model)
    data = []
    for turn in range(3):
        labels = ids.roll(turn, 0).masked_fill(torch.rand(ids.shape) < 0.3, -100)
        given = {main: inputs.roll(turn, 0), "decoder_input_ids": ids.roll(turn, 1)}
        data.append({**given, "labels": labels})
    parts = st.partition(model, 3, data[0], profile="parameters")
    assert max(len(block.name.split(".")) for block in parts.profile.blocks) <= 4
    trains_alike(alone, parts, data, parts.loss_fn, own_loss, microbatches=2)


# Columns added by collators


def test_columns_are_dropped_by_the_models_signature():
    """As in transformers' Trainer; the loss gets the named columns."""
    torch.manual_seed(0)
    model = made("Llama", "ForSequenceClassification", num_labels=3, pad_token_id=0)
    alone = copy.deepcopy(model)
    seen = []

    def loss_fn(output, batch):
        seen.append(set(batch))
        cross_entropy = torch.nn.functional.cross_entropy
        losses = cross_entropy(output.logits, batch["labels"], reduction="none")
        return (losses * batch["importance"]).mean()

    def expected(alone, given):
        taken = {name: given[name] for name in ("input_ids", "attention_mask")}
        return loss_fn(alone(**taken), given)

    data = []
    for rows in (4, 4, 1):
        given = {**batch(rows, 6, "right"), "labels": torch.arange(rows) % 3, "position_ids": None}
        more = {"idx": torch.tensor([rows]), "token_type_ids": given["input_ids"] * 0}
        weights = {"importance": torch.arange(1.0, rows + 1), "sentence": ["a"] * rows}
        data.append({**given, **more, **weights})
    parts = st.partition(model, 3, data[0], profile=EVEN, columns=["importance"])
    pipe = trains_alike(alone, parts, data, loss_fn, expected, microbatches=2)
    kept = {"input_ids", "attention_mask", "labels", "importance"}
    assert seen.count(kept) == 5  # the last minibatch has one sample
    del data[0]["input_ids"]
    with pytest.raises(TypeError, match=r"batches\[1\]: expected 'input_ids', .*; got 'attention_"):
        list(pipe.run([data[1], data[0]]))


# Errors


def t5(**more):
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, num_layers=2, **more))


def xlnet():
    sizes = {"vocab_size": 61, "d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 16}
    return tf.XLNetLMHeadModel(tf.XLNetConfig(**sizes))


def t5_encoder() -> Any:
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    return tf.T5EncoderModel(tf.T5Config(**sizes, num_layers=3))  # its first layer computes a bias


def asking_for(option: str) -> Any:
    model = made("Mixtral")
    setattr(model.config, option, True)
    return model


IDS = torch.arange(1, 9).unsqueeze(0)


@pytest.mark.parametrize(
    ("make", "example", "why"),
    [
        (t5, IDS, r"T5ForC.* fails on input_ids \(1, 8\): .* give decoder_input_ids"),
        (
            xlnet,
            None,
            r"XLNetLMHeadModel cannot .* only the first stage has 'transformer.mask_emb'",
        ),
        (t5_encoder, None, r"T5EncoderModel cannot be cut between .*encoder\.block"),
        (
            partial(asking_for, "output_hidden_states"),
            None,
            "config asks for output_hidden_states, which no stage has",
        ),
        (
            lambda: made("Llama", output_router_logits=True),
            None,
            "output_router_logits, of which a LlamaForCausalLM makes no aux_loss",
        ),
    ],
)
def test_models_that_are_no_decoders_are_named(
    make: Callable[[], Any], example: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        st.partition(make(), 2, example, profile="parameters")


def test_what_stands_for_other_stages_is_of_the_models_classes():
    """A model queries attributes of modules of any stage; no stage holds more for that."""

    class Asks(tf.LlamaForCausalLM):
        def forward(self, input_ids=None, use_cache=None, **more):
            for layer in self.model.layers:
                assert isinstance(layer.mlp, type(self.model.layers[0].mlp))
                layer.self_attn.o_proj.weight.mul_(1.0)
            assert self.model.embed_tokens.weight.dtype == torch.float32
            return super().forward(input_ids, use_cache=use_cache, **more)

    model = Asks(tf.LlamaConfig(**SMALL)).requires_grad_(False)
    parts = st.partition(model, 3, profile=EVEN)
    ids = batch(2, 5)["input_ids"]
    assert torch.equal(run(parts, ids).logits, model(ids).logits)
    assert {p for s in parts for p in s.parameters()} == set(model.parameters())
    assert not any(t.is_meta for s in parts for t in s.state_dict().values())


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_are_other_ones_in_evaluation(training):
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "context_length": 32}
    model = tf.RwkvForCausalLM(tf.RwkvConfig(**sizes, rescale_every=2)).train(training)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"RwkvForCausalLM divides .*rescale_every = 0"):
        st.partition(model, 3)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())


def test_models_that_have_more_between_blocks_than_a_hidden_state():
    class Adds(tf.models.llama.modeling_llama.LlamaModel):
        def forward(self, input_ids, **given):
            kept = []
            handle = self.layers[0].register_forward_hook(lambda _, a, found: kept.append(found))
            output = super().forward(input_ids, **given)
            handle.remove()
            output.last_hidden_state.add_(kept[0])
            return output

    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))
    model.model.__class__ = Adds
    message = "cannot be cut between the blocks of 'model.layers': the stages do not compute what"
    with pytest.raises(ValueError, match=message):
        st.partition(model, 2)


def test_an_example_is_made_up_for_the_config_of_the_text():
    text = {**SMALL, "head_dim": 8, "sliding_window": 3}
    vision = {"hidden_size": 16, "intermediate_size": 24, "image_size": 28, "patch_size": 14}
    config = tf.Gemma3Config(text_config=text, vision_config={**vision, **HEADS})
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    parts = st.partition(model, 3, profile=EVEN)
    ids = batch(2, 5)["input_ids"]
    torch.testing.assert_close(run(parts, ids).logits, model(ids).logits)


def test_blocks_that_are_left_out_at_random() -> None:
    model = made("OPT", layerdrop=0.9999).train()
    stages = list(st.partition(model, 3, profile=EVEN))
    with pytest.raises(RuntimeError, match=r"it left out a block where a stage ends"):
        run(stages, batch(2, 5))


@pytest.mark.parametrize("always", [True, False])
def test_a_loss_to_which_the_model_adds_something(always):
    class Adds(tf.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, use_cache=None):
            found = super().forward(input_ids, labels=labels, use_cache=use_cache)
            if labels is not None and (always or self.training):
                found.loss = found.loss + found.logits.pow(2).mean()
            return found

    parts = st.partition(Adds(tf.LlamaConfig(**SMALL)), 3, profile=EVEN)
    with pytest.raises(ValueError, match="a Adds's loss is not its loss_function's alone"):
        _ = parts.loss_fn


def first(parts: Any, batch: Any) -> Any:
    return parts.stages[0](batch)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda p: first(p, {"attention_mask": IDS}), "expected 'input_ids', and maybe 'attention"),
        (lambda p: first(p, {"input_ids": IDS, "inputs_embeds": IDS}), "takes 'inputs_embeds', an"),
        (lambda p: first(p, [IDS]), r"expected a mapping .*'input_ids' alone, got a li"),
        (lambda p: p.loss_fn(run(p, IDS), {"input_ids": IDS}), "needs 'labels', got 'input_ids'"),
    ],
)
def test_bad_batches(call: Callable[[Any], object], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        call(st.partition(made("Llama"), 2, profile=EVEN))
