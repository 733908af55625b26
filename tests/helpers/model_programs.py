"""Programs of ranks that cut whole models themselves."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict

import torch
from helpers.cut_models import sgd
from safetensors.torch import load_file
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

#: Sizes of small decoders.
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}


def named():
    torch.manual_seed(3)
    layers = OrderedDict(first=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(4, 3))
    return nn.Sequential(layers)


def loads_whole_dicts(rank, ranks):
    """Load the whole model's state on every rank; return the rank's part."""
    pipe = st.DistributedPipeline(cut_at(named(), [1, 2, 3])[rank], sgd, nn.functional.mse_loss)
    whole = {name: tensor + 1 for name, tensor in named().state_dict().items()}
    found = pipe.load_state_dict(whole)
    wrong = {name: tensor for name, tensor in whole.items() if not name.endswith("weight")}
    try:
        pipe.load_state_dict(wrong)
    except RuntimeError as error:
        return dict(pipe.state_dict()), list(found.missing_keys + found.unexpected_keys), str(error)


class Fails(nn.Linear):
    def forward(self, x):
        raise ArithmeticError("planned")


def cuts(rank, ranks):
    """Cut by rank 0's measurements with bad blocks, other counts, or none; return the errors."""
    found = []
    for blocks in ([nn.Linear(3, 3), Fails(3, 3)], [nn.Linear(3, 3)] * (3 + rank)):
        try:
            st.partition(nn.Sequential(*blocks), 2, torch.randn(4, 3))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")

    def lingers(*_):
        torch.linalg.svd(torch.rand(300, 300))

    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    model[0 if rank == 0 else 3].register_forward_pre_hook(lingers)
    ends = st.partition(model, 2, torch.randn(4, 3)).cut.ends
    assert ends == (1, 4)  # rank 0 was slow in the first block
    return found, ends


def decoder(rank, ranks, kind):
    """Cut and train a decoder on every rank.

    Return losses, weights by the model's names, and warnings of the uncut model's state_dict.
    """
    import transformers as tf

    torch.manual_seed(0)
    example = None
    if kind == "experts":
        asking = {"num_local_experts": 4, "output_router_logits": True}
        model = tf.MixtralForCausalLM(tf.MixtralConfig(**LLAMA, **asking))
    elif kind == "images":
        vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24}
        vision.update(num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
        text = {"model_type": "llama", **LLAMA}
        config = {"text_config": text, "vision_config": vision, "image_token_index": 60}
        model = tf.LlavaForConditionalGeneration(tf.LlavaConfig(**config))
        example = next(batches(images=True))
    else:
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, tie_word_embeddings=kind == "tied"))
    parts = st.partition(model, 3, example, profile="parameters")
    if ranks == 1:
        pipe = st.Pipeline(parts, sgd, parts.loss_fn, microbatches=3)
    else:
        stage = parts.stages[rank]
        pipe = st.DistributedPipeline(
            stage,
            sgd,
            parts.loss_fn,
            microbatches=3,
            passes=[st.passes.ShareLoss()],
        )
    losses = [result.loss.item() for result in pipe.run(batches(kind == "images"))]
    said = warnings_of(model.state_dict)
    copied = copy.deepcopy(model)
    if example is None and kind != "experts":  # transformers' hooks cannot be pickled
        copied = pickle.loads(pickle.dumps(copied))
    model.load_state_dict(model.state_dict(keep_vars=True))
    assert not warnings_of(pipe.state_dict, copied.state_dict, model.state_dict)
    return losses, dict(pipe.state_dict()), said


def warnings_of(*calls):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(each.message) for each in found]


def batches(images=False):
    generator = torch.Generator().manual_seed(5)
    for size, length in ((6, 7), (6, 7), (6, 9), (4, 5), (2, 8)):
        ids = torch.randint(1, 61, (size, length), generator=generator)
        mask = (torch.arange(length) < torch.randint(2, length, (size, 1))).long()
        labels = ids.masked_fill(mask == 0, -100)
        added = {"idx": torch.arange(3), "text": ["a"] * size}  # added by a collator
        if images:
            ids.clamp_(max=59)[:, 1:5] = 60
            added["pixel_values"] = torch.randn(size, 3, 28, 28, generator=generator)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels, **added}


def adapters(rank, ranks, folder):
    """Train an adapted GPT-2, and load all ranks' weights into the model that was cut.

    Returns what it generates, its adapter, all trained parameters, and the whole state.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    model = get_peft_model(gpt2(), LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8)).train()
    parts = st.partition(model, 2, profile="parameters")
    kind = st.Pipeline if ranks == 1 else st.DistributedPipeline
    more = {} if ranks == 1 else {"timeout": 60.0}
    stages = parts if ranks == 1 else parts.stages[rank]
    pipe = kind(stages, sgd, parts.loss_fn, microbatches=2, **more)
    for _ in pipe.run(batches()):
        pass
    if ranks == 1:
        model.load_state_dict(pipe.state_dict())
    else:
        st.checkpoint.save(folder, pipe, only_model=True)
        st.checkpoint.load(folder, model, only_model=True)
    model.eval()
    ids = torch.arange(1, 7).view(2, 3)
    said = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    adapter = {name: p.clone() for name, p in get_peft_model_state_dict(model).items()}
    whole = {name: p.clone() for name, p in model.state_dict().items()}
    return said, adapter, trained, whole


def unfreezing(rank, ranks):
    """Return the error of a run for which one rank has unfrozen a parameter."""
    stage = nn.Linear(3, 3)
    stage.bias.requires_grad_(False)
    pipe = st.DistributedPipeline(stage, sgd, nn.functional.mse_loss, "vanilla", timeout=30.0)
    data = [(torch.ones(4, 3), torch.ones(4, 3))] * 2
    for _ in pipe.run(data):
        pass
    stage.bias.requires_grad_(rank == 1)
    try:
        for _ in pipe.run(data):
            pass
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def gpt2(**more):
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**GPT2, **drops, pad_token_id=0, **more))


def trained_from_files(rank, ranks, source, folder):
    """Read, train and write each stage from files, so that no rank has the whole model."""
    with torch.device("meta"):
        model = gpt2()
    parts = st.partition(model, 2)
    st.materialize(parts.stages[rank], source)
    pipe = st.DistributedPipeline(
        parts.stages[rank], sgd, parts.loss_fn, passes=[st.passes.ShareLoss()]
    )
    torch.manual_seed(7)
    losses = [result.loss.item() for result in pipe.run(list(batches())[:2])]
    st.checkpoint.save(folder, pipe, only_model=True)
    if rank == 0:
        model.config.save_pretrained(folder)
    return losses, [name for name, p in model.named_parameters() if p.is_meta]


BLOCKS, WIDE = 16, 1024


def large():
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(BLOCKS)))


def peaks(rank, ranks, folder):
    """Return MiB of a stage of eight, and the extra MiB to read and to write it."""

    def memory(name):
        with open("/proc/self/status") as status:
            return next(int(s.split()[1]) / 1024 for s in status if s.startswith(name))

    def peak(work):
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # the peak is now the present use
        before = memory("VmHWM")
        work()
        return memory("VmHWM") - before

    with torch.device("meta"):
        model, small = large(), nn.Linear(1, 1)
    stage = cut_at(model, range(2, BLOCKS + 1, 2))[3]
    st.materialize(small)  # makes torch import its modules first
    reading = peak(lambda: st.materialize(stage, folder))
    writing = peak(lambda: st.checkpoint.save(f"{folder}/stage", stage, only_model=True))
    whole = peak(lambda: large().load_state_dict(load_file(f"{folder}/model.safetensors")))
    return sum(p.nbytes for p in stage.parameters()) / 2**20, reading, writing, whole
