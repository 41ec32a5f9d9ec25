"""Measures the training speed of three kinds of models on random data with Horovod.

The models differ in what they ask of the network:

- ``vgg``: a few huge fully connected matrices hold nearly all parameters;
- ``resnet``: many small tensors, convolutions and normalizations;
- ``bert``: an embedding, many mid-sized matrices and small layer norms.

    horovodrun -np 2 --gloo python examples/synthetic_benchmark.py --model resnet
"""

import argparse
import os
import statistics
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000
VOCABULARY = 8192
MASKED_SHARE = 0.15  # of a sequence's tokens, as in BERT's pre-training
# model: default (width, depth, size); one thread then takes about a tenth of a second a step
PRESETS = {"vgg": (32, 3, 32), "resnet": (16, 10, 32), "bert": (256, 4, 32)}


def parse_args() -> argparse.Namespace:
    """Reads the command line and fills in the sizes of the chosen model."""
    presets = ", ".join(f"{model} {sizes}" for model, sizes in PRESETS.items())
    parser = argparse.ArgumentParser(
        description="Time synchronous training steps on random data.",
        epilog=f"Default (width, depth, size): {presets}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=PRESETS, default="resnet", help="kind of model")
    unset = argparse.SUPPRESS
    add("--width", type=int, default=unset, help="channels of the first stage; bert: hidden size")
    add("--depth", type=int, default=unset, help="stages, residual blocks or transformer layers")
    add("--size", type=int, default=unset, help="side of the square images; bert: tokens")
    add("--batch-size", type=int, default=8, help="samples per rank and step")
    add("--steps", type=int, default=100, help="steps to time")
    add("--warmup", type=int, default=10, help="steps before, which are not timed")
    add("--lr", type=float, default=0.01, help="learning rate of one rank, times the ranks")
    add("--seed", type=int, default=1, help="seed of model and data")
    add("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    add("--autocast", action="store_true", help="compute in bfloat16 where torch.autocast does")
    args = vars(parser.parse_args())
    preset = dict(zip(("width", "depth", "size"), PRESETS[args["model"]], strict=True))
    return argparse.Namespace(**preset | args)


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


def vgg(width: int, depth: int, size: int) -> nn.Sequential:
    """``depth`` stages that halve the image, then three fully connected layers."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(depth):
        layers += [nn.Conv2d(channels, width << stage, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width << stage
    inputs, hidden = channels * (size >> depth) ** 2, 64 * width
    layers += [nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, CLASSES))


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch normalization."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around which the input passes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv_norm(inputs, outputs, 3, stride)
        self.conv2 = conv_norm(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``n x inputs x h x w`` to ``n x outputs x (h / stride) x (w / stride)``."""
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


def resnet(width: int, depth: int) -> nn.Sequential:
    """``depth`` residual blocks in three stages, of doubling width and halving resolution."""
    layers: list[nn.Module] = [conv_norm(3, width, 3), nn.ReLU()]
    channels = width
    for block in range(depth):
        outputs = width << (3 * block // depth)
        layers.append(ResidualBlock(channels, outputs, outputs // channels))
        channels = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(*layers, *head)


class Bert(nn.Module):
    """A transformer encoder that predicts the first ``masked`` tokens of each sequence."""

    def __init__(self, width: int, depth: int, size: int) -> None:
        super().__init__()
        self.masked = max(1, round(MASKED_SHARE * size))
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(size, width)
        nn.init.normal_(self.token.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, width // 64 or 1, 4 * width, activation="gelu", batch_first=True
                )
                for _ in range(depth)
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``n x size`` to logits ``(n * masked) x vocabulary``."""
        hidden: Tensor = self.layers(self.norm(self.token(tokens) + self.position.weight))
        return hidden[:, : self.masked].flatten(0, 1) @ self.token.weight.T


def make_job(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Builds the model and one random batch of inputs and labels."""
    if args.model == "bert":
        bert = Bert(args.width, args.depth, args.size)
        model: nn.Module = bert
        inputs = torch.randint(VOCABULARY, (args.batch_size, args.size))
        labels = torch.randint(VOCABULARY, (args.batch_size * bert.masked,))
    else:
        sizes = (args.width, args.depth)
        model = vgg(*sizes, args.size) if args.model == "vgg" else resnet(*sizes)
        inputs = torch.randn(args.batch_size, 3, args.size, args.size)
        labels = torch.randint(CLASSES, (args.batch_size,))
    return model.to(device), inputs.to(device), labels.to(device)


def main() -> None:
    """Times the steps and reports their median."""
    args = parse_args()
    device = set_up(args.seed)
    model, inputs, labels = make_job(args, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    if hvd.rank() == 0:
        sizes = [p.numel() * p.element_size() for p in model.parameters()]
        print(f"{args.model}: {len(sizes)} tensors, {sum(sizes) / 1e6:.1f} MB", flush=True)

    step_s = []
    for _ in range(args.warmup + args.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        step_s.append(time.perf_counter() - start)

    median = torch.tensor(statistics.median(step_s[args.warmup :]))
    median_s = hvd.allreduce(median, name="median_step").item()
    if hvd.rank() == 0:
        speed = args.batch_size / median_s
        print(f"step: median {1e3 * median_s:.1f} ms (of {args.steps} steps, mean of the ranks)")
        print(f"samples/s: {speed:.1f} per rank, {speed * hvd.size():.1f} in total", flush=True)


if __name__ == "__main__":
    main()
