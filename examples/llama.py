"""A Llama from transformers over several processes, a stage each; only rank 0 reads data.

torchrun --nproc-per-node 2 examples/llama.py --layers 4 --width 64
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import spectrain_ext as st

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--layers", type=int, default=4)
arguments.add_argument("--width", type=int, default=64)
arguments.add_argument("--context", type=int, default=64)
arguments.add_argument("--steps", type=int, default=60)
args = arguments.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.context,
        tie_word_embeddings=False,
    )
)
parts = st.partition(model, ranks)  # where rank 0's measurements say, on all ranks
pipe = st.DistributedPipeline(
    parts.stages[rank],
    optimizer=lambda parameters: st.optim.AdamW(parameters, lr=3e-3),
    loss_fn=parts.loss_fn,
    device=f"cuda:{rank}" if torch.cuda.device_count() >= ranks else None,
    share_loss=True,
)


def batches():
    tokens = torch.frombuffer(
        bytearray(inspect.getsource(inspect), "utf8"), dtype=torch.uint8
    ).long()
    for _ in range(args.steps):
        starts = torch.randint(len(tokens) - args.context, (16, 1))
        ids = tokens[starts + torch.arange(args.context)]
        yield {"input_ids": ids, "labels": ids}


for result in pipe.run(batches() if rank == 0 else None):
    if rank == 0 and result.index % 10 == 0:
        print(result.index, f"{result.loss.item():.3f} nats a byte")
dist.destroy_process_group()
