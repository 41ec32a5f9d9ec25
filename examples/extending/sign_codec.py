"""A codec of one file: one bit per element, and one scale.

What travels is whether each element is positive, and the mean of their magnitudes. What that misses
is added to the next gradient (EF-signSGD: Karimireddy et al., ICML 2019, algorithm 1).

    HVD_AUTOSYNC_EXTENSIONS=examples/extending/sign_codec.py \
      horovodrun -np 2 --autosync --autosync-allow codec python train.py
"""

import torch

from hvd_autosync.extensions import add_codec
from hvd_autosync.runtime.collectives.operations import ProcessSet, allgather_async
from hvd_autosync.runtime.exchange.codecs import LEFT_OUT, Codec
from hvd_autosync.runtime.exchange.exchanges import Scaling, Steps
from hvd_autosync.search_space.exchange_plan import ClassPlan

#: Bytes of the scale, a float32.
SCALE = 4


class Sign(Codec):
    """Adds up the coded gradients of all ranks.

    Args:
        count: Elements of the tensor.
        like: A tensor of its type, on its device.
        ranks: How many ranks reduce it.
    """

    def __init__(self, count: int, like: torch.Tensor, ranks: int) -> None:
        super().__init__(count, like, ranks)
        self._owed = like.new_zeros(count)
        self._bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=like.device).byte()
        self._positive = self._bits.new_zeros(-(-count // 8) * 8)

    def __call__(
        self, tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet
    ) -> Steps:
        """Reduce ``tensor``, shape ``(count,)``, in place."""
        owed = self._owed.add_(tensor)
        self._positive[: self.size] = owed >= 0
        scale = owed.abs().mean().to(torch.float32)
        packed = (self._positive.view(-1, 8) * self._bits).sum(1, dtype=torch.uint8)
        message = torch.cat([scale.view(1).view(torch.uint8), packed])
        owed.sub_(self._decode(message))
        gathered = yield allgather_async(message, name=name, process_set=among)
        tensor.zero_()
        for each in gathered.view(self.ranks, -1):
            tensor.add_(self._decode(each))
        if not bool(tensor.isfinite().all()):
            self.reset()  # what overflowed, as in mixed precision, must not come back later
        tensor.mul_(scaling.before * scaling.after)

    def _decode(self, message: torch.Tensor) -> torch.Tensor:
        scale = message[:SCALE].clone().view(torch.float32).to(self.like.dtype)
        positive = (message[SCALE:, None] & self._bits).view(-1)[: self.size] > 0
        return torch.where(positive, scale, -scale)

    def sent_bytes(self) -> float:
        """Bytes that each rank sends per step, on average."""
        return (self.ranks - 1) * (SCALE + -(-self.size // 8))

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank carries from step to step."""
        return {LEFT_OUT: self._owed}

    def left_out(self) -> torch.Tensor:
        """What error feedback keeps of this rank's tensors."""
        return self._owed


def make(plan: ClassPlan, count: int, like: torch.Tensor, ranks: int) -> Sign:
    """The codec of one bucket; ``plan`` has the numbers of the class, as its ratio."""
    return Sign(count, like, ranks)


add_codec("sign", make, classes=("large",))
