"""Trains a generator and a discriminator, each with an optimizer, in turn.

The discriminator is frozen while the generator is trained. With ``--synchronize`` it is not, and
what its gradients have become is reduced and dropped, as Horovod demands.
"""

import itertools
import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F


def network(*sizes):
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def train(freeze=True, steps=40):
    torch.manual_seed(0)
    generator, discriminator = network(8, 32, 12), network(12, 32, 1)
    parts = {"generator": generator, "discriminator": discriminator}
    optimizers = []
    for (name, part), rate in zip(parts.items(), (1e-3, 2e-3), strict=True):
        # Names need to differ only if both optimizers have gradients on their way at once.
        named = part.named_parameters("" if freeze else name)
        optimizer = torch.optim.Adam(part.parameters(), lr=rate, betas=(0.5, 0.999))
        optimizers.append(hvd.DistributedOptimizer(optimizer, named_parameters=named))
        hvd.broadcast_parameters(part.state_dict(), root_rank=0)
    for_generator, for_discriminator = optimizers
    random = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    for _ in range(steps):
        real = torch.randn(6, 12, generator=random) + 1
        fake = generator(torch.randn(6, 8, generator=random))
        for_discriminator.zero_grad()
        verdicts = discriminator(real), discriminator(fake.detach())
        F.binary_cross_entropy_with_logits(verdicts[0], torch.ones(6, 1)).add(
            F.binary_cross_entropy_with_logits(verdicts[1], torch.zeros(6, 1))
        ).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        if freeze:
            discriminator.requires_grad_(False)
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(6, 1))
        loss.backward()
        for_generator.step()
        if freeze:
            discriminator.requires_grad_(True)
        else:
            for_discriminator.synchronize()
    return {
        f"{name}.{own}": parameter
        for name, part in parts.items()
        for own, parameter in part.named_parameters()
    }


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train(sys.argv[1:] != ["--synchronize"])
    if hvd.rank() == 0:
        print("the loop is complete")
