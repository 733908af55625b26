"""SGD with smoothed gradients and decoupled weight decay, which torch.optim.SGD does not have."""

from __future__ import annotations

import torch


class AveragingSGD(torch.optim.Optimizer):
    """v = mu*v + (1 - mu)*g from v = 0 with ``smoothed``; W shrinks by lr*decay if decoupled."""

    def __init__(self, params, lr, **options):
        options = {
            "momentum": 0.9,
            "weight_decay": 0.0,
            "nesterov": False,
            "smoothed": False,
            "decoupled_weight_decay": False,
            **options,
        }
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, mu, decay = group["lr"], group["momentum"], group["weight_decay"]
            gain = 1 - mu if group["smoothed"] else 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["decoupled_weight_decay"]:
                    p *= 1 - lr * decay
                    gradient = p.grad
                else:
                    gradient = p.grad + decay * p
                state = self.state[p]
                v = state.get("momentum_buffer", torch.zeros_like(p))
                v = state["momentum_buffer"] = mu * v + gain * gradient
                p -= lr * (gain * gradient + mu * v if group["nesterov"] else v)
