"""Trains neural collaborative filtering on implicit feedback with Horovod.

The data are on every machine that has Python: each function of the standard library is a
"user", each name it mentions an "item" it interacted with. As in He et al., "Neural
Collaborative Filtering" (WWW 2017), generalized matrix factorization (GMF) and a multi-layer
perceptron (MLP) with embeddings of their own are trained on sampled negatives, and tested by
ranking one held-out item of each user among 99 others. Nearly all parameters are embeddings:
``--sparse`` exchanges only the rows that a batch touched.

    horovodrun -np 2 --gloo python examples/train_ncf.py --sparse
"""

import argparse
import ast
import os
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CANDIDATES = 100  # the held-out item and 99 that its user never touched
MIN_USES = 2  # functions that mention a name, for it to become an item
MIN_HISTORY = 5  # items that a function mentions, for it to become a user
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3"}


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Recommend names to the functions of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=5, help="passes over the interactions")
    add("--batch-size", type=int, default=512, help="interactions per rank and step")
    add("--negatives", type=int, default=4, help="items sampled per interaction")
    add("--lr", type=float, default=5e-3, help="rate of Adam; Adagrad takes ten times that")
    add("--factors", type=int, default=32, help="size of each of the four embeddings")
    add("--seed", type=int, default=1, help="seed of split, model and negatives")
    add("--sparse", action="store_true", help="sparse embedding gradients, with Adagrad")
    add("--autocast", action="store_true", help="compute in bfloat16 where torch.autocast does")
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


def read_functions() -> Iterator[set[str]]:
    """Yields the names that each function of the standard library mentions."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                yield names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


class Interactions(NamedTuple):
    """Implicit feedback, split by leaving one item of each user out."""

    users: int
    items: int
    train: Tensor  # n x 2: user, item
    candidates: Tensor  # users x 100: the held-out item comes first


def load_data(seed: int) -> Interactions:
    """Numbers functions and names, the same way on every rank."""
    functions = list(read_functions())
    uses = Counter(name for names in functions for name in names)
    kept = sorted(name for name, count in uses.items() if count >= MIN_USES)
    number = {name: index for index, name in enumerate(kept)}
    histories = [sorted(number[name] for name in names if name in number) for names in functions]
    histories = [history for history in histories if len(history) >= MIN_HISTORY]

    rng = random.Random(seed)
    train, candidates = [], []
    for user, history in enumerate(histories):
        held_out, seen = rng.choice(history), set(history)
        train += [(user, item) for item in history if item != held_out]
        drawn = rng.sample(range(len(kept)), CANDIDATES + len(history))
        unseen = [item for item in drawn if item not in seen]
        candidates.append([held_out, *unseen[: CANDIDATES - 1]])
    return Interactions(len(histories), len(kept), torch.tensor(train), torch.tensor(candidates))


class NeuralFilter(nn.Module):
    """GMF and MLP side by side, joined in one output unit."""

    def __init__(self, users: int, items: int, factors: int, sparse: bool) -> None:
        super().__init__()
        self.gmf_user, self.mlp_user, self.gmf_item, self.mlp_item = (
            nn.Embedding(rows, factors, sparse=sparse) for rows in (users, users, items, items)
        )
        self.mlp = nn.Sequential(
            nn.Linear(2 * factors, factors), nn.ReLU(), nn.Linear(factors, factors // 2), nn.ReLU()
        )
        self.output = nn.Linear(factors + factors // 2, 1)
        for table in (self.gmf_user, self.gmf_item, self.mlp_user, self.mlp_item):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Maps users and items, of the same shape, to logits of that shape."""
        product = self.gmf_user(users) * self.gmf_item(items)
        deep = self.mlp(torch.cat([self.mlp_user(users), self.mlp_item(items)], dim=-1))
        logits: Tensor = self.output(torch.cat([product, deep], dim=-1))
        return logits.squeeze(-1)


def batches(data: Interactions, args: argparse.Namespace, epoch: int) -> Iterator[Tensor]:
    """Yields this rank's batches ``batch_size x 2`` of an epoch, equally many on each rank."""
    generator = torch.Generator().manual_seed(args.seed * 1000 + epoch)
    order = torch.randperm(len(data.train), generator=generator)[hvd.rank() :: hvd.size()]
    steps = len(data.train) // hvd.size() // args.batch_size
    for chosen in order.split(args.batch_size)[:steps]:
        yield data.train[chosen]


def batch_loss(model: nn.Module, batch: Tensor, items: int, negatives: int) -> Tensor:
    """Cross-entropy of interactions (label 1) and of randomly drawn items (label 0)."""
    users, positives = batch.unbind(dim=1)
    drawn = torch.randint(items, (len(batch) * negatives,), device=batch.device)
    logits = model(users.repeat(negatives + 1), torch.cat([positives, drawn]))
    labels = (torch.arange(len(logits), device=batch.device) < len(batch)).float()
    return F.binary_cross_entropy_with_logits(logits, labels)


def count_hits(scores: Tensor) -> Tensor:
    """Counts the rows ``users x 100`` whose first score is among the ten highest."""
    return ((scores[:, 1:] >= scores[:, :1]).sum(dim=1) < 10).float().sum()


def popularity_hit_rate(data: Interactions) -> float:
    """Hit rate of recommending to everyone what most users use: the model has to beat it."""
    uses = torch.bincount(data.train[:, 1], minlength=data.items)
    return count_hits(uses[data.candidates]).item() / data.users


@torch.no_grad()
def hit_rate(model: nn.Module, data: Interactions, device: torch.device) -> float:
    """Share of users whose held-out item ranks among the first ten of their candidates."""
    users = torch.arange(hvd.rank(), data.users, hvd.size())
    items = data.candidates[users].to(device)
    hits = count_hits(model(users.to(device).unsqueeze(1).expand_as(items), items))
    return float(hvd.allreduce(hits, name="hits", op=hvd.Sum)) / data.users


def main() -> None:
    """Trains and reports once per epoch."""
    args = parse_args()
    device = set_up(args.seed)
    data = load_data(args.seed)
    model = NeuralFilter(data.users, data.items, args.factors, args.sparse).to(device)
    if args.sparse:
        torch.sparse.check_sparse_tensor_invariants.disable()  # undecided, torch warns
        # unlike SparseAdam, Adagrad takes dense gradients too: the perceptron has those
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), 10 * args.lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    torch.manual_seed(args.seed * hvd.size() + hvd.rank())  # ranks draw their own negatives
    if hvd.rank() == 0:
        print(f"by popularity: hit rate@10 {popularity_hit_rate(data):.3f}", flush=True)

    for epoch in range(1, args.epochs + 1):
        start, seen = time.perf_counter(), 0
        for batch in batches(data, args, epoch):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                loss = batch_loss(model, batch.to(device), data.items, args.negatives)
            loss.backward()
            optimizer.step()
            seen += len(batch) * hvd.size()
        speed = seen / (time.perf_counter() - start)
        rate = hit_rate(model, data, device)
        if hvd.rank() == 0:
            print(f"epoch {epoch:3d}  hit rate@10 {rate:.3f}  {speed:7.0f} pairs/s", flush=True)


if __name__ == "__main__":
    main()
