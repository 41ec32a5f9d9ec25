"""Keeps an exponential moving average of the weights, and evaluates it."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn


def train(steps=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    generator = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    batches = [torch.randn(8, 16, generator=generator) for _ in range(steps)]
    for inputs in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
        average.update_parameters(model)
    update_bn(batches[:3], average)
    return {
        **dict(model.named_parameters()),
        **{f"average.{name}": each for name, each in average.module.named_parameters()},
    }


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train()
    if hvd.rank() == 0:
        print("the loop is complete")
