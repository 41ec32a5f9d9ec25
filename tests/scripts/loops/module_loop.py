"""A module that says how it is trained, and a loop that trains any such module, as in Lightning.

The loop validates, and saves on rank 0, after each epoch.
"""

import io

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Digits(nn.Module):
    """A classifier with hooks of a LightningModule."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(40, 4)

    def training_step(self, batch):
        inputs, targets = batch
        return F.cross_entropy(self.head(self.body(inputs)), targets)

    def validation_step(self, batch):
        inputs, targets = batch
        return (self.head(self.body(inputs)).argmax(1) == targets).float().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)

    def on_before_optimizer_step(self, step):
        self.norms = [p.grad.norm() for p in self.parameters()] if step % 5 == 0 else []


class Loop:
    """Trains a module on this rank's share of the data."""

    def __init__(self, epochs):
        self.epochs = epochs
        self.saved = io.BytesIO()

    def fit(self, module, data):
        optimizer, scheduler = module.configure_optimizers()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters())
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        sampler = DistributedSampler(data, hvd.size(), hvd.rank())
        step = 0
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            for batch in DataLoader(data, batch_size=8, sampler=sampler):
                loss = module.training_step(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.synchronize()
                module.on_before_optimizer_step(step)
                with optimizer.skip_synchronize():
                    optimizer.step()
                scheduler.step()
                step += 1
            self.validate(module, data)
            if hvd.rank() == 0:
                saved = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved, self.saved)

    def validate(self, module, data):
        module.eval()
        with torch.no_grad():
            right = torch.stack([module.validation_step(b) for b in DataLoader(data, 32)]).mean()
        module.train()
        return hvd.allreduce(right, name="right")


def train(epochs=4):
    torch.manual_seed(0)
    inputs = torch.randn(160, 24)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    module = Digits()
    Loop(epochs).fit(module, data)
    return dict(module.named_parameters())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train()
    if hvd.rank() == 0:
        print("the loop is complete")
