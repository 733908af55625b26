"""Whole models that ranks cut for themselves, importable by the ranks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at


def sgd(params):
    return st.optim.SGD(params, lr=0.05, momentum=0.9)


def named():
    torch.manual_seed(3)
    layers = OrderedDict(first=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(4, 3))
    return nn.Sequential(layers)


def loads_whole_dicts(rank, ranks):
    """What a rank has of the whole model's state, after it has loaded all of that."""
    pipe = st.DistributedPipeline(cut_at(named(), [1, 2, 3])[rank], sgd, nn.functional.mse_loss)
    whole = {name: tensor + 1 for name, tensor in named().state_dict().items()}
    found = pipe.load_state_dict(whole)
    wrong = {name: tensor for name, tensor in whole.items() if not name.endswith("weight")}
    try:
        pipe.load_state_dict(wrong)
    except RuntimeError as error:
        return dict(pipe.state_dict()), list(found.missing_keys + found.unexpected_keys), str(error)


class Fails(nn.Linear):
    """Where it is measured."""

    def forward(self, x):
        raise ArithmeticError("planned")


def cuts(rank, ranks):
    """How cuts by rank 0's measurements end: with blocks that fail there, other numbers, none."""
    found = []
    for blocks in ([nn.Linear(3, 3), Fails(3, 3)], [nn.Linear(3, 3)] * (3 + rank)):
        try:
            st.partition(nn.Sequential(*blocks), 2, torch.randn(4, 3), repeats=1)
        except (ArithmeticError, RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    return found, st.partition(model, 2, torch.randn(4, 3), repeats=1).cut.ends


def decoder(rank, ranks, tied):
    """A decoder that every rank cuts, trained; its losses and weights by the model's names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    more = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **more, tie_word_embeddings=tied))
    parts = st.partition(model, 3, profile="parameters")
    if ranks == 1:
        pipe = st.Pipeline(parts, sgd, parts.loss_fn, microbatches=3)
    else:
        stage = parts.stages[rank]
        pipe = st.DistributedPipeline(
            stage, sgd, parts.loss_fn, microbatches=3, share_loss=True, dynamic_shapes=True
        )
    losses = [result.loss.item() for result in pipe.run(batches())]
    return losses, dict(pipe.state_dict())


def batches():
    generator = torch.Generator().manual_seed(5)
    for size, length in ((6, 7), (6, 7), (6, 9), (4, 5), (2, 8)):
        ids = torch.randint(1, 61, (size, length), generator=generator)
        mask = (torch.arange(length) < torch.randint(2, length, (size, 1))).long()
        labels = ids.masked_fill(mask == 0, -100)
        added = {"idx": torch.arange(3), "text": ["a"] * size}  # by a collator
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels, **added}
