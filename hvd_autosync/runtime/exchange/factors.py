"""The exchange ``factors``: sends what a linear layer's gradient is the product of.

The gradient of a linear layer's weight is G^T X, with X the layer's inputs and G the gradients of
its outputs, one row for each row of the batch. Every rank gathers all ranks' X and G and
multiplies: K (m + n) numbers from each rank in place of a ring's 2 (r - 1) / r m n, K rows of r
ranks ("sufficient factor broadcasting", Xie et al., 2015; Poseidon, USENIX ATC 2017, section 3.2).

Each rank's product is made by the call of autograd, with its rounding, and products are added in
the order of ranks. So the sum differs from a ring's by the order of addition, and all ranks get the
same bits. Before it sends, a rank compares the whole product with its gradient; where they differ
(a shared or penalized weight, a hook of the script's, a gradient that was not zeroed) all ranks
send whole gradients in that step, and after some such steps in all.

Behind a ReLU half of the factors are zeros, so messages can travel as lossless codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from hvd_autosync.runtime.collectives.agreement import agree_order, same_on_all
from hvd_autosync.runtime.collectives.operations import size
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.exchange.backoff import Backoff
from hvd_autosync.runtime.exchange.buckets import Bucket, FlatBucket, wire_dtype
from hvd_autosync.runtime.exchange.changed_gradients import sum_of_bits
from hvd_autosync.runtime.exchange.exchanges import Flat, Scaling, Steps
from hvd_autosync.runtime.exchange.gathering import Gathering
from hvd_autosync.runtime.exchange.lossless import HEADER_BYTES, decode, encode, header_of, set_mark
from hvd_autosync.runtime.measure.arithmetic import arithmetic
from hvd_autosync.runtime.measure.repeated_bits import AS_IS, Form
from hvd_autosync.runtime.patches.linear import LinearLayer, LinearPass, is_product, product
from hvd_autosync.search_space.exchange_plan import most_factor_bytes

#: Steps whose gradient was not the product, after which factors are given up.
_MOST_REFUSALS = 3
#: Steps between two checksums of the weight.
_CHECK_EVERY = 64
#: Each part of a message begins at a multiple of this, bytes: the vector length of processors.
_ALIGNMENT = 64
#: Horovod negotiates again about a gathered tensor whose length has changed. So a code has the
#: length of the one before, while it fits and wastes less than this share of the message.
_WASTE = 1 / 32
#: Steps after which a rank looks again what its codes can leave out; it takes longer than coding.
_LOOK_EVERY = 16
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Status(IntEnum):
    """What a rank says of its factors in one step."""

    #: They follow.
    SENT = 1
    #: Their product is not the gradient.
    REFUSED = 2
    #: They are more bytes than the gradient.
    MORE = 3
    #: Gradients are not finite, as in steps that a gradient scaler skips.
    NOT_FINITE = 4


@dataclass(frozen=True)
class Message:
    """One rank's factors of one layer in one step.

    On the wire: 64-bit integers (length, status, checksum, index of the type, number of passes,
    rows of each pass), then inputs and output gradients of each pass; all parts aligned.

    Attributes:
        status: Whether they follow.
        passes: The factors, one for each backward pass.
        checksum: Of the weight before the step; 0 in steps without one.
    """

    status: Status
    passes: tuple[LinearPass, ...] = ()
    checksum: int = 0

    def encode(self, device: torch.device) -> torch.Tensor:
        """Return the message as bytes on a device, shape ``(length,)``."""
        tensors = [t for each in self.passes for t in (each.inputs, each.output_gradients)]
        kind = _DTYPES.index(tensors[0].dtype) if tensors else 0
        header = [0, self.status, self.checksum, kind, len(self.passes)]
        header += [each.rows for each in self.passes]
        sizes = [8 * len(header), *(t.numel() * t.element_size() for t in tensors)]
        header[0] = sum(map(_aligned, sizes))
        encoded = torch.zeros(header[0], dtype=torch.uint8, device=device)
        begin = 0
        tensors.insert(0, torch.tensor(header, device="cpu"))
        for size_bytes, tensor in zip(sizes, tensors, strict=True):
            part = encoded[begin : begin + size_bytes]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            begin += _aligned(size_bytes)
        return encoded

    @classmethod
    def decode_all(cls, encoded: torch.Tensor, shape: torch.Size) -> list[Message]:
        """Return the messages of all ranks, in the order in which they were gathered.

        Args:
            encoded: The messages one behind the other.
            shape: Shape of the weight, ``m x n``.
        """
        messages = []
        begin = 0
        while begin < len(encoded):
            messages.append(cls._decode(encoded[begin:], shape))
            begin += int(encoded[begin : begin + 8].view(torch.int64))
        return messages

    @classmethod
    def _decode(cls, encoded: torch.Tensor, shape: torch.Size) -> Message:
        _, status, checksum, kind, count = encoded[:40].view(torch.int64).tolist()
        rows = encoded[40 : 40 + 8 * count].view(torch.int64).tolist()
        dtype = _DTYPES[kind]
        begin = _aligned(40 + 8 * count)

        def take(*dimensions: int) -> torch.Tensor:
            nonlocal begin
            size_bytes = dimensions[0] * dimensions[1] * dtype.itemsize
            part = encoded[begin : begin + size_bytes].view(dtype).view(dimensions)
            begin += _aligned(size_bytes)
            return part

        passes = tuple(LinearPass(take(k, shape[1]), take(k, shape[0])) for k in rows)
        return cls(Status(status), passes, checksum)


class FactorsBucket(Bucket):
    """The gradients of one linear layer.

    Args:
        name: As of any bucket.
        layer: The watched layer.
        parameters: Its weight, and its bias if that is trained too.
        scaling: Factors of the reduction.
        rank: This rank.
        gathering: How messages of all ranks are gathered.
        lossless: Whether messages travel as lossless codes, in steps in which these are shorter.
    """

    needs_all = True

    def __init__(
        self,
        name: str,
        layer: LinearLayer,
        parameters: Sequence[torch.nn.Parameter],
        scaling: Scaling,
        rank: int,
        gathering: Gathering,
        *,
        lossless: bool = False,
    ) -> None:
        super().__init__(name, parameters)
        self._layer: LinearLayer | None = layer
        self._scaling = scaling
        self._rank, self._gathering = rank, gathering
        self._whole = [
            FlatBucket(f"{name}.{number}", (parameter,), Flat(scaling))
            for number, parameter in enumerate(self.parameters)
        ]
        self._refusals = 0
        self._backoff = Backoff()
        #: Of this rank's own codes; each says itself whether it is one.
        self._coding = Backoff() if lossless else None
        self._form: Form | None = None
        self._code_bytes = 0
        self._steps = 0
        #: Own gradients with the sums of their bits, once they are the products of what is sent.
        self._made: list[tuple[torch.Tensor, int]] = []
        #: Whether all ranks' weights were equal at the first checksum.
        self._equal: bool | None = None

    def send(self) -> Steps:
        if self._layer is None or self._backoff.skips():
            yield from self.send_plainly()
            return
        own = self._own_message(self._layer)
        if self._coding is None:
            encoded = yield from self._gathering.gather(own, f"{self.name}.factors")
        else:
            coded = self._coded(own, self._coding)
            codes = yield from self._gathering.gather(coded, f"{self.name}.codes")
            known = {self._gathering.places[self._rank]: own.cpu()}
            encoded = decode_messages(codes, known).to(own.device)
        gathered = Message.decode_all(encoded, self.parameters[0].shape)
        messages = [gathered[place] for place in self._gathering.places]
        self._layer.clear()
        self._compare_weights([message.checksum for message in messages])
        if all(message.status is Status.SENT for message in messages):
            self._backoff.tried(paid=True)
            self._put([message.passes for message in messages])
            return
        self._decide([message.status for message in messages])
        yield from self.send_plainly()

    def reset(self) -> None:
        super().reset()
        self.sent_in_place = False

    def send_plainly(self) -> Steps:
        if self._layer is not None:
            self._layer.clear()
        self.sent_in_place = True
        for bucket in self._whole:
            yield from bucket.send_plainly()

    def _own_message(self, layer: LinearLayer) -> torch.Tensor:
        """Return this rank's message; if its factors are sent, its gradients are their products."""
        weight = self.parameters[0]
        message = Message(Status.SENT, tuple(layer.passes), self._checksum())
        status = self._unusable(message)
        if status is None:
            encoded = message.encode(weight.device)
            # From here on a product is made of operands that lie in memory as on other ranks.
            (sent,) = Message.decode_all(encoded, weight.shape)
            status = self._multiply(sent.passes)
        if status is Status.SENT:
            return encoded
        return replace(message, status=status, passes=()).encode(weight.device)

    def _coded(self, message: torch.Tensor, backoff: Backoff) -> torch.Tensor:
        if len(message) == _ALIGNMENT or backoff.skips():  # without factors, or not yet again
            return encode_message(message, AS_IS)
        form = self._form if self._steps % _LOOK_EVERY else None
        code = encode_message(message, form, self._code_bytes)
        form = header_of(code).form
        shorter = form != AS_IS
        self._form, self._code_bytes = (form, len(code)) if shorter else (None, 0)
        backoff.tried(paid=shorter)
        return code

    def _unusable(self, message: Message) -> Status | None:
        """Return why factors are not even multiplied, if there is a reason."""
        kinds = {each.inputs.dtype for each in message.passes}
        if len(kinds) > 1 or not kinds <= {*_DTYPES}:
            return Status.REFUSED
        pay = _pay(message.passes, self.parameters[0], len(self._gathering.places))
        return None if pay else Status.MORE

    @torch.no_grad()
    def _multiply(self, passes: Sequence[LinearPass]) -> Status:
        """Make the products of this rank's factors, and compare them with its gradients."""
        self._made = []
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient, bias = parameter.grad, number == 1
            if gradient.is_sparse:
                return Status.REFUSED
            if not passes:
                if bool(gradient.any()):
                    return Status.REFUSED
                self._made.append((gradient, sum_of_bits(gradient)))
                continue
            made = product(passes, gradient.dtype, bias=bias)
            if not is_product(made, gradient, passes, bias=bias):
                finite = bool(gradient.isfinite().all())
                return Status.REFUSED if finite else Status.NOT_FINITE
            if not torch.equal(made, gradient):
                gradient.copy_(made)
            self._made.append((gradient, sum_of_bits(gradient)))
        return Status.SENT

    @torch.no_grad()
    def _put(self, passes: Sequence[Sequence[LinearPass]]) -> None:
        """Set the gradients to the sums of all ranks' products, in the order of ranks."""
        factor = self._scaling.before * self._scaling.after
        for number, (parameter, made) in enumerate(zip(self.parameters, self._made, strict=True)):
            own = parameter.grad
            assert own is not None
            # Others add what was sent, whatever the script has done to the gradient since.
            kept = own is made[0] and sum_of_bits(own) == made[1]
            if not kept and not passes[self._rank]:
                own.zero_()
                kept = True
            total: torch.Tensor | None = None
            for each, theirs in enumerate(passes):
                is_own = each == self._rank and kept
                if not is_own and not theirs:
                    continue
                term = own if is_own else product(theirs, own.dtype, bias=number == 1)
                if total is None:
                    total = term.to(torch.promote_types(own.dtype, torch.float32))
                else:
                    total.add_(term)
            assert total is not None
            total.mul_(factor)
            if total is not own:
                own.copy_(total)

    def _decide(self, statuses: Sequence[Status]) -> None:
        """Decide about the next steps, as all ranks do."""
        if Status.REFUSED in statuses:
            self._refusals += 1
            if self._refusals == _MOST_REFUSALS:
                self._give_up(
                    f"the gradient of {self.name} is not the product of its layer's inputs and "
                    "output gradients (the weight is shared or penalized, or the script changes "
                    "its gradient)"
                )
        elif Status.MORE in statuses:
            self._backoff.tried(paid=False)

    def _give_up(self, why: str) -> None:
        if self._layer is None:
            return
        self._layer = None  # it is watched no longer
        warn_on_rank_0(f"{why}; from now on it is sent whole instead of by factors")

    def _checksum(self) -> int:
        """Return a checksum of the weight's bits, in some steps; else 0."""
        self._steps += 1
        if self._equal is False or self._steps % _CHECK_EVERY != 1:
            return 0
        return sum_of_bits(self.parameters[0])

    def _compare_weights(self, checksums: Sequence[int]) -> None:
        if checksums[0] == 0:
            return
        equal = all(checksum == checksums[0] for checksum in checksums)
        if self._equal and not equal:
            self._give_up(
                f"{self.name} has come to differ between the ranks, and stays so: their processors "
                "or libraries multiply differently, the script changes the weight on some, or some "
                "have missed steps in join()"
            )
        self._equal = equal


def encode_message(
    message: torch.Tensor, form: Form | None = None, before: int = 0
) -> torch.Tensor:
    """Return a lossless code of an encoded message, on the host, shape ``(bytes,)``, padded.

    Args:
        message: As :meth:`Message.encode` returns it.
        form: As of :func:`~hvd_autosync.runtime.exchange.lossless.encode`; the code has the bits
            as they are where it would be longer.
        before: Bytes of the code before, which it gets if they are enough and not far too many.
    """
    numbers = message.view(torch.float32)
    code = encode(numbers, form)
    if len(code) > HEADER_BYTES + len(message):
        code = encode(numbers, AS_IS)
    spare = int(_WASTE * len(message))
    length = before
    if not len(code) <= before <= len(code) + spare:
        # In the middle of the lengths for which it is kept.
        length = _aligned(min(len(code) + spare // 2, HEADER_BYTES + len(message)))
    padded = torch.zeros(length, dtype=torch.uint8, device="cpu")
    padded[: len(code)] = code
    set_mark(padded, length)
    return padded


def decode_messages(codes: torch.Tensor, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the messages whose codes lie one behind the other, one behind the other, on the host.

    They are copied, so that their parts are aligned on all ranks alike.

    Args:
        codes: The codes.
        known: Place -> the message whose code is there, which is not decoded.
    """
    messages: list[torch.Tensor] = []
    begin = 0
    while begin < len(codes):
        code, own = codes[begin:], known.get(len(messages))
        messages.append(decode(code).view(torch.uint8) if own is None else own)
        begin += header_of(code).mark
    return torch.cat(messages)


def pays(rows: int, weight: torch.Tensor, item_bytes: int) -> bool:
    """Return whether factors are fewer bytes than a ring's, and can be gathered.

    Args:
        rows: Rows of the batches of all ranks.
        weight: The layer's weight, shape ``m x n``.
        item_bytes: Bytes of an element of the factors.
    """
    whole = weight.numel() * wire_dtype(weight.dtype).itemsize
    return rows * sum(weight.shape) * item_bytes < most_factor_bytes(whole)


def _pay(passes: Sequence[LinearPass], weight: torch.Tensor, ranks: int) -> bool:
    """Return whether the factors of a step pay if each of so many ranks has as many."""
    rows = ranks * sum(each.rows for each in passes)
    return pays(rows, weight, max((each.inputs.dtype.itemsize for each in passes), default=0))


def agree_linear(
    parameters: Sequence[torch.nn.Parameter],
    layers: Mapping[torch.nn.Parameter, LinearLayer],
    name: str,
) -> list[LinearLayer]:
    """Return the watched layers that all ranks exchange by factors; a collective.

    They are those through which a batch has passed on rank 0 in the first step, of so few rows that
    factors pay: the others would be watched, and their inputs held, for nothing. None where ranks
    multiply by different processors or libraries.

    Args:
        parameters: All parameters of the optimizer.
        layers: The watched ones' layers.
        name: Name of the operation.
    """
    if not layers:
        return []
    device = next(iter(layers)).device
    alike = same_on_all(arithmetic(device), f"arithmetic.{name}")
    if not alike:
        warn_on_rank_0(
            "processors, libraries or numbers of threads differ between the ranks, so products of "
            "factors would: gradients are sent whole"
        )
    index: dict[torch.nn.Parameter | None, int] = {p: i for i, p in enumerate(parameters)}
    # Of each parameter the index of its bias, itself without one; -1: no factors.
    places = [-1] * len(parameters)
    for weight, layer in layers.items():
        if alike and layer.passes and _pay(layer.passes, weight, size()):
            bias = layer.bias if layer.bias in index else None
            places[index[weight]] = index[weight if bias is None else bias]
    chosen: list[LinearLayer] = []
    for weight, place in zip(parameters, agree_order(places, f"{name}.linear"), strict=True):
        if place >= 0:
            bias = parameters[place]
            taken = bias is weight or any(bias is layer.bias for layer in chosen)
            layers[weight].bias = None if taken else bias
            chosen.append(layers[weight])
    return chosen


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
