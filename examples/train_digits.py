"""Trains a small convolutional network on handwritten digits with Horovod.

The data are the 1797 images of 8 x 8 pixels that come with scikit-learn, so nothing is
downloaded. Every rank trains on its own shard of the training images, Horovod averages the
gradients, and every rank tests its own shard of the test images.

    horovodrun -np 2 --gloo python examples/train_digits.py
"""

import argparse
import os
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
IMAGE_SIZE = 8


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN on scikit-learn's 8 x 8 digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=16, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument(
        "--lr", type=float, default=0.01, help="learning rate of one rank, multiplied by the ranks"
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    parser.add_argument("--channels", type=int, default=32, help="channels of the first block")
    parser.add_argument("--hidden", type=int, default=2048, help="units of the hidden layer")
    parser.add_argument("--test-share", type=float, default=0.2, help="share of images to test on")
    parser.add_argument("--seed", type=int, default=1, help="seed of split, model and shuffling")
    return parser.parse_args()


def set_up(seed: int) -> torch.device:
    """Joins the Horovod job, seeds torch and returns the device of this rank."""
    hvd.init()
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        number = hvd.local_rank() % torch.cuda.device_count()  # ranks may share a device
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a host share its cores
    return torch.device("cpu")


def load_data(test_share: float, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Splits the digits, the same way on every rank.

    Returns:
        Training and test set: images ``n x 1 x 8 x 8`` in [0, 1] and labels ``n``.
    """
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.long)
    train, test = train_test_split(
        range(len(labels)), test_size=test_share, random_state=seed, stratify=digits.target
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class DigitNet(nn.Module):
    """Three convolution blocks, then two fully connected layers."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *self._block(1, channels),
            *self._block(channels, channels),
            nn.MaxPool2d(2),
            *self._block(channels, 2 * channels),
        )
        side = IMAGE_SIZE // 2
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * channels * side * side, hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )

    @staticmethod
    def _block(inputs: int, outputs: int) -> list[nn.Module]:
        """Convolution, normalization, activation; the normalization brings the bias."""
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    def forward(self, images: Tensor) -> Tensor:
        """Maps images ``n x 1 x 8 x 8`` to logits ``n x 10``."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def train_epoch(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> float:
    """Trains on this rank's shard once and returns the mean loss over all ranks."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return float(hvd.allreduce(total / len(loader), name="train_loss"))


@torch.no_grad()
def test(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Tests each rank's shard and returns the accuracy on all test images."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in data.tensors)
    correct = (model(images).argmax(dim=1) == labels).float().sum()
    return float(hvd.allreduce(correct, name="test_correct", op=hvd.Sum)) / len(data)


def main() -> None:
    """Trains and reports once per epoch."""
    args = parse_args()
    device = set_up(args.seed)
    train_data, test_data = load_data(args.test_share, args.seed)
    sampler = DistributedSampler[int](train_data, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train_data, args.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(f"--batch-size {args.batch_size} exceeds a rank's {len(sampler)} images")

    model = DigitNet(args.channels, args.hidden).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum, weight_decay=5e-4
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    images_per_epoch = len(loader) * args.batch_size * hvd.size()
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        loss = train_epoch(model, loader, optimizer, device)
        seconds = time.perf_counter() - start
        accuracy = test(model, test_data, device)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch:3d}  loss {loss:.4f}  test accuracy {accuracy:.2%}  "
                f"{images_per_epoch / seconds:7.0f} images/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
