"""Fine-tune a causal language model: padding, gradient accumulation, evaluation, checkpoints.

python examples/finetune.py --stages 2 --out runs/finetune
torchrun --nproc-per-node 2 examples/finetune.py --out runs/finetune

Start it again to resume, to the bit. The default model is a tiny Llama with random weights whose
tokens are bytes; --model takes a causal language model that transformers can load.
"""

import argparse
import inspect
import math
import os
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointManager, ShuffledSampler

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--model", help="a name or folder for from_pretrained")
arguments.add_argument("--text", type=Path, help="samples separated by blank lines")
arguments.add_argument("--stages", type=int, default=2, help="with torchrun: one per process")
arguments.add_argument("--epochs", type=int, default=3)
arguments.add_argument("--batch", type=int, default=16, help="samples per minibatch")
arguments.add_argument("--microbatches", type=int, default=4, help="per minibatch")
arguments.add_argument("--context", type=int, default=64, help="most tokens of a sample")
arguments.add_argument("--lr", type=float, default=3e-3)
arguments.add_argument("--warmup", type=int, default=10, help="updates")
arguments.add_argument("--every", type=int, default=10, help="minibatches between evaluations")
arguments.add_argument("--out", type=Path, default=Path("runs/finetune"))
args = arguments.parse_args()

rank, ranks = st.join_ranks() if "WORLD_SIZE" in os.environ else (0, 1)
stages = ranks if ranks > 1 else args.stages
torch.manual_seed(0)  # the same weights on all ranks

# The model and the data.
text = args.text.read_text() if args.text else inspect.getsource(inspect)
samples = [sample for sample in text.split("\n\n") if sample.strip()]
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model).train()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = [tokenizer(sample).input_ids[: args.context] for sample in samples]
else:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=args.context,
    )
    model = LlamaForCausalLM(config).train()
    tokens = [list(sample.encode())[: args.context] for sample in samples]


def collate(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sample; a label of -100 does not count."""
    ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, sample in enumerate(batch):
        ids[n, : len(sample)] = torch.tensor(sample)
        mask[n, : len(sample)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


held_out = len(tokens) // 10 + 1
sampler = ShuffledSampler(len(tokens) - held_out, args.batch, seed=1)
train = DataLoader(
    Subset(tokens, range(held_out, len(tokens))), batch_sampler=sampler, collate_fn=collate
)
test = DataLoader(Subset(tokens, range(held_out)), args.batch, collate_fn=collate)
updates = args.epochs * len(sampler)

# The optimizer. No weight decay for norms, biases (they have one dimension) and embeddings.
embeddings = ("embed", "wte", "wpe")
undecayed = {
    parameter
    for name, parameter in model.named_parameters()
    if parameter.dim() < 2 or any(part in name for part in embeddings)
}


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p not in undecayed], "weight_decay": 0.1},
        {"params": [p for p in parameters if p in undecayed], "weight_decay": 0.0},
    ]
    return st.optim.AdamW([group for group in groups if group["params"]], lr=args.lr)


def warmup_then_cosine(update: int) -> float:
    if update < args.warmup:
        return (update + 1) / args.warmup
    done = (update - args.warmup) / max(1, updates - args.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


# The pipeline. The cut is the same at every start, as resuming to the bit needs.
example = next(iter(test))
parts = st.partition(model, stages, example, profile="parameters")
options = {
    "optimizer": optimizer,
    "scheduler": lambda optimizer: LambdaLR(optimizer, warmup_then_cosine),
    "loss_fn": parts.loss_fn,  # the sum over tokens, and their number
    "microbatches": args.microbatches,
    "clip_norm": 1.0,
}
gpus = torch.cuda.device_count() >= stages
if ranks > 1:
    device = f"cuda:{rank}" if gpus else None
    pipe = st.DistributedPipeline(
        parts.stages[rank],
        device=device,
        passes=[st.passes.ShareLoss()],
        **options,
    )
else:
    devices = [f"cuda:{k}" for k in range(stages)] if gpus else None
    pipe = st.Pipeline(parts, devices=devices, **options)

# The loop. A manager's run drains the pipeline, so it ends where we evaluate and save.
manager = CheckpointManager(args.out / "checkpoints", pipe, sampler=sampler, keep=2)
manager.restore()
while sampler.epoch < args.epochs:
    for result in manager.run(islice(train, args.every)):
        if rank == 0 and result.index % 5 == 0:
            print(f"minibatch {result.index}: loss {result.loss.item():.3f}")
    scores = pipe.evaluate(test)
    manager.save()
    if rank == 0:
        print(f"test loss {scores['loss']:.4f}, perplexity {math.exp(scores['loss']):.2f}")

# The trained model. Over ranks, each has trained only its own stage of it.
if ranks > 1:
    dist.destroy_process_group()
if rank == 0:
    st.checkpoint.load(manager.latest(), model, only_model=True)
    model.save_pretrained(args.out / "model")
    if args.model:
        tokenizer.save_pretrained(args.out / "model")
