"""A small GPT on a mesh of processes: data, pipeline and tensor parallelism at once.

torchrun --nproc-per-node 8 examples/mesh.py --dp 2 --pp 2 --tp 2

As in torchtitan, the model is cut into stages first, and a function then shards each stage. It is
trained on Python's own source code; a token is a byte.
"""

import argparse
import inspect
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import spectrain_ext as st
from spectrain_ext.partitioning import cut_at

arguments = argparse.ArgumentParser(description=__doc__)
for name, what in (("dp", "replicas"), ("pp", "stages"), ("tp", "ranks that share a stage")):
    arguments.add_argument(f"--{name}", type=int, default=2, help=what)
arguments.add_argument("--layers", type=int, default=4)
arguments.add_argument("--width", type=int, default=64)
arguments.add_argument("--context", type=int, default=64)
arguments.add_argument("--steps", type=int, default=60)
arguments.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
args = arguments.parse_args()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # A shard of the projections is a number of whole heads.
        heads = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Embedding(args.context, width)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words) + self.places(torch.arange(words.shape[1]).expand_as(words))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def make_layers() -> list[nn.Module]:
    blocks = [Block(args.width) for _ in range(args.layers)]
    return [Embedding(args.width), *blocks, Head(args.width)]


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shard matrices by rows and columns, and activations between them by sequence."""
    split: dict[str, object] = {"use_local_output": False, "output_layouts": Shard(1)}
    for part in stage.modules():
        if isinstance(part, Embedding):
            whole = RowwiseParallel(input_layouts=Replicate(), **split)
            parallelize_module(part, mesh, {"words": whole, "places": whole})
        elif isinstance(part, Block):
            gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan = {
                **dict.fromkeys(("norm1", "norm2"), SequenceParallel()),
                **dict.fromkeys(("attention", "mlp"), gathered),
                **{name: ColwiseParallel() for name in ("attention.q", "attention.k")},
                **{name: ColwiseParallel() for name in ("attention.v", "mlp.0")},
                **{name: RowwiseParallel(**split) for name in ("attention.out", "mlp.2")},
            }
            parallelize_module(part, mesh, plan)
        elif isinstance(part, Head):
            out = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
            parallelize_module(part, mesh, {"norm": SequenceParallel(), "out": out})


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


tokens = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()


def batch(size: int = 16) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - args.context - 1, (size, 1))
    text = tokens[starts + torch.arange(args.context + 1)]
    return text[:, :-1], text[:, 1:]


rank, _ = st.join_ranks()
mesh = init_device_mesh("cpu", (args.dp, args.pp, args.tp), mesh_dim_names=("dp", "pp", "tp"))
torch.manual_seed(0)  # the same weights everywhere
layers = make_layers()
ends = [len(layers) * (k + 1) // args.pp for k in range(args.pp)]
stage = cut_at(layers, ends)[mesh.get_local_rank("pp")]
parallelize(stage, mesh["tp"])
pipe = st.DistributedPipeline(
    stage,
    optimizer=lambda parameters: st.optim.AdamW(parameters, lr=3e-3),
    loss_fn=loss,
    microbatches=args.dp * args.pp,
    group=mesh,
)

batches = (batch() for _ in range(args.steps))
for result in pipe.run(batches if rank == 0 else None):
    first = mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 0
    if first and result.has_loss and result.index % 10 == 0:
        print(result.index, f"{result.loss.item():.3f} nats a byte", flush=True)
test = batch(64)
value = pipe.evaluate([test] if rank == 0 else None)["loss"]

# The file has whole tensors under the uncut model's names: any cut, mesh or plain module loads it.
st.checkpoint.save(args.checkpoint, pipe, overwrite=True)
if rank == 0:
    model = nn.Sequential(*make_layers())
    st.checkpoint.load(args.checkpoint, model, only_model=True)
    print(f"{value:.4f} nats a byte, and {loss(model(test[0]), test[1]).item():.4f} in one process")
dist.barrier()
dist.destroy_process_group()
