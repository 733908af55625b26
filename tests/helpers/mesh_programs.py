"""A small GPT and a small Llama on meshes of processes, and in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

from .passes import with_passes

WORDS, LENGTH, HEADS, HEAD = 24, 8, 4, 4
WIDTH = HEADS * HEAD
STAGES = 2

#: Sums over shards round once more, and in another order, than those in one process. An inner
#: product of K terms differs by at most 2*K*u of the sum of its terms' magnitudes (Higham, Accuracy
#: and Stability, 3.5), u = 1.1e-16 in float64. K <= 4*WIDTH = 64; one forward and backward have
#: about 60 products in a row, and training repeats them in 6 updates: 2*64*60*6*u = 5e-12.
CLOSE = {"rtol": 1e-9, "atol": 5e-11}


class Attention(nn.Module):
    def __init__(self, rotates: bool) -> None:
        super().__init__()
        self.rotates = rotates
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = heads
        if self.rotates:
            q, k = rotated(q), rotated(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0])
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Mlp(nn.Module):
    def __init__(self, gated: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=not gated)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False) if gated else None
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=not gated)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        up = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        return self.drop(self.down(up))


class Block(nn.Module):
    """A block of Llama (RMSNorm, rotated heads, a gate), or of GPT."""

    def __init__(self, llama: bool, dropout: float) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = Attention(llama), Mlp(llama, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def stages(
    llama: bool = False,
    dropout: float = 0.0,
    count: int = STAGES,
    dtype: torch.dtype = torch.double,
    adapted: bool = False,  # whether only adapters of low rank are trained
) -> list[nn.Module]:
    torch.manual_seed(5)
    blocks = [Block(llama, dropout) for _ in range(STAGES)]
    layers = [nn.Embedding(WORDS, WIDTH), *blocks, Head(llama)]
    if adapted:
        from peft import LoraConfig, inject_adapter_in_model

        rank_2 = LoraConfig(r=2, target_modules=["q", "down"], init_lora_weights=False)
        layers = [layers[0], *(inject_adapter_in_model(rank_2, b) for b in blocks), layers[-1]]
        for end in (layers[0], layers[-1]):
            end.requires_grad_(False)
    for layer in layers:
        layer.to(dtype)
    ends = [len(layers) * (k + 1) // count for k in range(count)]
    return [*cut_at(layers, ends)]


def parallelize(
    stage: nn.Module, mesh: DeviceMesh, sequence: bool, whole_output: bool = True
) -> nn.Module:
    """Shard a stage; with ``sequence``, activations between its blocks are shards too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows: Any = RowwiseParallel()
    whole: dict[str, Any] = {}
    if sequence:
        rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        whole = {
            name: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            for name in ("attention", "mlp")
        } | {name: SequenceParallel() for name in ("norm1", "norm2")}
    for part in stage.modules():
        if isinstance(part, Block):
            columns = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")
            plan = {name: ColwiseParallel() for name in columns[: 5 if part.mlp.gate else 4]}
            plan |= {"attention.o": rows, "mlp.down": rows, **whole}
            if hasattr(part.attention.q, "base_layer"):  # an adapter: B is cut as its layer, or A
                plan["attention.q.base_layer"] = plan.pop("attention.q")
                plan["mlp.down.base_layer"] = plan.pop("mlp.down")
                plan["attention.q.lora_B.default"] = ColwiseParallel()
                plan["mlp.down.lora_A.default"] = RowwiseParallel()
            parallelize_module(part, mesh, plan)
        elif isinstance(part, Head):
            read = Shard(1) if sequence else Replicate()
            written = Replicate() if whole_output else Shard(-1)
            shown = ColwiseParallel(
                input_layouts=read, output_layouts=written, use_local_output=whole_output
            )
            plan = {"out": shown}
            parallelize_module(
                part, mesh, plan | ({"norm": SequenceParallel()} if sequence else {})
            )
        elif isinstance(part, nn.Embedding):
            more = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
            plan = RowwiseParallel(input_layouts=Replicate(), **more)
            parallelize_module(part, mesh, plan)
    return stage


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(count: int = 5, samples: int = 4) -> list[Any]:
    g = torch.Generator().manual_seed(7)
    texts = [torch.randint(WORDS, (samples, LENGTH + 1), generator=g) for _ in range(count)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


OPTIMIZERS = {
    "sgd": lambda ps: st.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: st.optim.AdamW(ps, lr=2e-3),
    "nadam": lambda ps: st.optim.NAdam(ps, lr=2e-3),
    "torch": lambda ps: torch.optim.AdamW(ps, lr=2e-3),
}


def mesh_of(**dims: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def on_mesh(
    mesh: DeviceMesh,
    method: str | st.Method,
    model: Mapping[str, Any] | None = None,
    sequence: bool = False,
    optimizer: str = "sgd",
    whole_output: bool = True,
    **more: Any,
) -> st.DistributedPipeline:
    """Make this rank's part of the pipeline; without a dimension ``tp``, of whole stages."""
    names, count = mesh.mesh_dim_names or (), more.pop("count", STAGES)
    here = stages(**(model or {}), count=count)[mesh.get_local_rank("pp") :: mesh["pp"].size()]
    if "tp" in names:
        here = [parallelize(stage, mesh["tp"], sequence, whole_output) for stage in here]
    settings = with_passes({"microbatches": 2, "timeout": 30.0, **more})
    torch.manual_seed(9)
    part = here[0] if len(here) == 1 else here
    return st.DistributedPipeline(part, OPTIMIZERS[optimizer], loss, method, group=mesh, **settings)


def in_one(
    method: str | st.Method,
    model: Mapping[str, Any] | None = None,
    sequence: bool = False,
    optimizer: str = "sgd",
    **more: Any,
) -> st.Pipeline:
    settings = with_passes({"microbatches": 2, **more})
    parts = stages(**(model or {}), count=settings.pop("count", STAGES))
    torch.manual_seed(9)
    return st.Pipeline(parts, OPTIMIZERS[optimizer], loss, method, **settings)


def whole_state(pipe: st.Pipeline) -> dict[str, Tensor]:
    """Return whole tensors under the model's names; all ranks call this."""
    return {name: whole(value).clone() for name, value in pipe.state_dict().items()}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def data_of(pipe: st.Pipeline, *given: Any) -> list[Any] | None:
    return batches(*given) if getattr(pipe, "rank", 0) == 0 else None
