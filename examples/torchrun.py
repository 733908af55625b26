"""Train over several processes, save and evaluate, and resume after a stop.

torchrun --nproc-per-node 2 examples/torchrun.py --checkpoints runs/torchrun

Restart it with any number of processes to resume from the same checkpoint. The model has one stage
per process, at most three; further processes are replicas. With --max-restarts torchrun restarts it
by itself.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectrain_ext as st
from spectrain_ext.checkpoint import CheckpointManager, ShuffledSampler
from spectrain_ext.partitioning import cut_at

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--epochs", type=int, default=3)
arguments.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
arguments.add_argument("--every", type=int, default=30, help="minibatches from save to save")
arguments.add_argument("--stop-file", type=Path, help="save and exit as soon as this file exists")
arguments.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank")
args = arguments.parse_args()

rank, ranks = st.join_ranks()
torch.manual_seed(0)  # the same weights everywhere
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
sampler = ShuffledSampler(1440, batch_size=48, seed=1)  # the order depends on the seed only
train = DataLoader(data, batch_sampler=sampler)
test = DataLoader(torch.utils.data.Subset(data, range(1440, len(data))), 64)

blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(5)]
blocks.append(nn.Linear(64, 10))
count = max(n for n in (1, 2, 3) if ranks % n == 0)  # stages
stages = cut_at(blocks, ends=[len(blocks) * (k + 1) // count for k in range(count)])
replicas = ranks // count  # per stage
pipe = st.DistributedPipeline(
    stages[rank // replicas],
    optimizer=lambda parameters: st.optim.AdamW(parameters, lr=2e-3),
    loss_fn=nn.functional.cross_entropy,
    replicas=replicas,
    timeout=args.timeout,
)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


manager = CheckpointManager(
    args.checkpoints, pipe, sampler=sampler, every_minibatches=args.every, keep=2
)
manager.restore()
stop = torch.zeros(1)
while sampler.epoch < args.epochs:
    for _ in manager.run(train):
        if rank == 0 and args.stop_file is not None and args.stop_file.exists():
            stop.fill_(1)
            break  # on rank 0 this ends the run for all ranks
    dist.broadcast(stop, 0)
    if stop:
        break
    scores = pipe.evaluate(test, {"accuracy": accuracy})  # the same on every rank
    if rank == 0:
        print(f"epoch {sampler.epoch}: {100 * scores['accuracy']:.1f} %")
manager.save()
dist.destroy_process_group()
