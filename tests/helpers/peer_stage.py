"""A rank of torch.distributed.pipelining in its own process, for test_torch_schedules.py.

    python peer_stage.py RANK PORT FILE

FILE holds a list of trainings; the losses, gradients and weights of each go to FILE.RANK.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

DEADLINE = timedelta(seconds=60)


def main(rank, port, file):
    rank = int(rank)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=DEADLINE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=DEADLINE)
    try:
        jobs = torch.load(file, weights_only=False)
        torch.save([train(rank, job) for job in jobs], f"{file}.{rank}")
        dist.barrier()  # no rank leaves while the other still receives
    finally:
        dist.destroy_process_group()


def train(rank, job):
    module = job["stages"][rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[job["schedule"]]
    pipe = kind(stage, job["microbatches"], loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), **job["options"])
    losses, gradients = [], []
    for value, target in job["batches"]:
        optimizer.zero_grad()
        if rank == 0:
            pipe.step(value)
        else:
            found = []
            pipe.step(target=target, losses=found)
            losses.append(torch.stack(found).mean().detach())
        gradients.append([p.grad.clone() for p in module.parameters()])
        optimizer.step()
    weights = [p.detach() for p in module.parameters()]
    return {"losses": losses, "gradients": gradients, "weights": weights}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
