"""Builds small causal language models of any transformers family, cut in two."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import spectrain_ext as st

LAYERS, WIDTH = 4, 32
SIZES = {  # maximum sizes, by the name of a config value
    r"(num_hidden|num|n|decoder|encoder|num_decoder|num_encoder)_layers?": LAYERS,
    r"mamba(_n|_num)_heads|n_mamba_heads": 8,
    r"qk_head_dim": 16,
    r"((num|encoder|decoder|n|linear_num|linear_num_value|index_n|swa_num"
    r"|num_encoder|num_decoder|attention)_)(attention_)?heads?": 4,
    r"(swa_)?num_key_value_heads|num_kv_heads|linear_num_key_heads|n_groups|mamba_n_groups": 2,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|topk_group|n_group|num_expert_group|o_groups": 2,
    r".*n(um)?_shared_experts|first_k_dense_replace|num_dense_layers|num_codebooks": 2,
    r"(hidden|embedding|input_embedding|attention_hidden|backbone_hidden)_size": WIDTH,
    r"d_model|n_embd": WIDTH,
    r"emb_dim|word_embed_proj_dim|lru_width|conv_dim|ple_embed_dim": WIDTH,
    r"hidden_size_per_layer_input": WIDTH,
    r"(.*_)?head_(dim|size)|dim_head|v_head_dim|qk_(rope|nope)_head_dim|mamba_d_head": 8,
    r"d_kv|d_head": 8,
    r"(moe_)?num_(local_)?experts|n_routed_experts|index_topk|rotary_dim": 8,
    r"(attention_)?window_size|sliding_window(_size)?|attention_chunk_size": 8,
    r"(kv|q|o)_lora_rank|(mamba_d_|ssm_)?state(_size)?|patch_size|(mamba_)?chunk_size": 16,
    r"(.*_)?intermediate_size(_mlp)?|n_inner|dim_ff|dff|feed_forward_size": 48,
    r"((en|de)coder_)?ffn_dim|(expert_)?ffn_hidden_size": 48,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length": 192,
    r"max_(source|target)_positions|original_max_position_embeddings": 192,
    r"(.*_)?vocab_size(_per_layer_input)?": 97,
    r"image_size": 32,
}
DROPS = re.compile(r".*(dropout|pdrop|layerdrop|drop_rate|jitter).*|dropout_p")


def shrunk(values: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values, reduced in size, without dropout."""
    counts = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    layers = next((values[n] for n in counts if isinstance(values.get(n), int)), 0)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in mine:
            continue
        if isinstance(value, dict):
            found[name] = shrunk(value, {}) if name.endswith("config") else value
        elif isinstance(value, list):
            if layers and len(value) == layers:
                kinds = [v for i, v in enumerate(value) if v not in value[:i]]
                value = [kinds[i % len(kinds)] for i in range(LAYERS)]
            found[name] = value
        elif isinstance(value, float) and DROPS.fullmatch(name):
            found[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            if name == "num_key_value_heads" and "qk_rope_head_dim" in values:
                value = 4  # latent attention has no groups
            elif name.endswith("token_id") or name.endswith("token_index"):
                value = min(value, 96)
            else:
                sizes = (most for names, most in SIZES.items() if re.fullmatch(names, name))
                value = min(value, next(sizes, value))
            found[name] = value
        else:
            found[name] = value
    return {**found, **mine}


def made(family: str, mine: dict[str, Any]) -> nn.Module:
    """Return a small model with these values in its config."""
    kind = CONFIG_MAPPING[family]
    mine = dict(mine)
    values = kind(**mine.pop("made with", {})).to_dict()
    for name in ("transformers_version", "model_type", "architectures", "dtype"):
        values.pop(name, None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**shrunk(values, mine)), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases too: no value is neutral
            if p.is_floating_point():
                p.add_(torch.randn_like(p) * 0.02)
    return model


def outcome(family: str, mine: dict[str, Any]) -> str:
    """Compare a model in two stages with the whole: ``equal``, or the difference."""
    try:
        model, alone = made(family, mine), made(family, mine)
        torch.manual_seed(1)
        ids = torch.randint(3, 90, (2, 12))
        for training in (True, False):
            _gradients(alone.train(training), ids, {"input_ids": ids, "use_cache": False})
    except Exception as error:
        return f"not made: {type(error).__name__}: {error}"
    try:
        parts = st.partition(model, 2, profile="parameters")
    except ValueError as error:
        return f"refused: {error}"
    try:
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        loss_fn: Any = parts.loss_fn
    except ValueError:
        del batch["labels"]
        loss_fn = None
    found = []
    for training in (True, False):
        stages = nn.Sequential(*parts).train(training)
        for p in stages.parameters():
            p.grad = None
        output = stages(ids)
        loss = loss_fn(output, batch) if loss_fn else _loss(output.logits, ids)
        if isinstance(loss, tuple):  # a sum and its count
            loss = loss[0] / loss[1]
        loss.backward()
        names = {s.cut.full_name(n): p.grad for s in parts for n, p in s.named_parameters()}
        other, gradients = _gradients(alone.train(training), ids, {**batch, "use_cache": False})
        pairs = [(loss, other), *((names[name], g) for name, g in gradients.items())]
        apart = [_apart(a, b) for a, b in pairs]
        found.append("equal" if not any(apart) else "close" if max(apart) < 1e-5 else "far")
    return " and ".join(dict.fromkeys(found)) + ("" if loss_fn else ", without a loss")


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    count = min(logits.shape[1], ids.shape[1]) - 1
    flat = logits[:, :count].reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, ids[:, 1 : count + 1].reshape(-1) % logits.shape[-1])


def _gradients(
    model: nn.Module, ids: Tensor, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    output = model(**given)
    loss: Tensor = output.loss if "labels" in given else _loss(output.logits, ids)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def _apart(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:  # missing, or only zeros
        return sum(float(t.abs().max()) for t in (a, b) if t is not None)
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
