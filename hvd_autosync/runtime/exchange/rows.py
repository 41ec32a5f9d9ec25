"""The exchange ``rows``: sends only the rows of an embedding's gradient that some batch touched.

The gradient of ``nn.Embedding`` is a dense matrix that is zero except in the rows of the batch, or
a sparse tensor. Every rank gathers the indices of all touched rows, then the rows. Whether that is
less than the whole matrix follows from the indices, which all ranks have, so all decide alike.
"""

from __future__ import annotations

import torch

from hvd_autosync.runtime.collectives.operations import MOST_GATHERED_BYTES, allgather_async
from hvd_autosync.runtime.exchange.backoff import Backoff
from hvd_autosync.runtime.exchange.buckets import Bucket, FlatBucket, dense_gradient, wire_dtype
from hvd_autosync.runtime.exchange.exchanges import Flat, Scaling, Steps, add_at
from hvd_autosync.runtime.measure.touched import touched_rows


class RowsBucket(Bucket):
    """The gradient of one embedding table.

    Args:
        name: As of any bucket.
        parameter: The table, shape ``(rows, ...)``.
        scaling: Factors of the reduction.
        sparse_dimensions: Of its gradients, if they are sparse tensors; else 0.
    """

    needs_all = True
    #: The sum of a sparse exchange, until the step finds it.
    _sum: torch.Tensor | None = None

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        scaling: Scaling,
        *,
        sparse_dimensions: int = 0,
    ) -> None:
        super().__init__(name, (parameter,))
        self._sparse = sparse_dimensions
        self._scaling = scaling
        self._whole = FlatBucket(name, (parameter,), Flat(scaling))
        self._backoff = Backoff()

    def reset(self) -> None:
        super().reset()
        self.sent_in_place = False
        if self._sum is not None:
            # Only now: the script may have replaced the gradient since it was sent.
            (table,) = self.parameters
            table.grad, self._sum = self._sum, None

    def send(self) -> Steps:
        (table,) = self.parameters
        if self._sparse:
            yield from self._send_sparse(table)
        elif self._backoff.skips():
            yield from self.send_plainly()
        else:
            yield from self._send_touched(dense_gradient(table))

    def send_plainly(self) -> Steps:
        gradient = dense_gradient(self.parameters[0])
        self.sent_in_place = True
        yield from self._whole.send()
        if self._sparse:
            # Also where backward has left none in this step: its optimizer may take no dense one.
            self._sum = gradient.to_sparse(self._sparse)

    def _send_touched(self, gradient: torch.Tensor) -> Steps:
        own = touched_rows(gradient)
        sent = own if len(own) else own.new_zeros(1)  # an untouched row adds nothing
        numbers = yield allgather_async(sent.to(torch.int32), name=f"{self.name}.numbers")
        # A ring gathers K rows with half of the bytes that it reduces K rows with; the other half
        # pays for selecting them.
        if len(numbers) > len(gradient) or self._too_many(numbers, wire_dtype(gradient.dtype)):
            self._backoff.tried(paid=False)
            yield from self.send_plainly()
            return
        self._backoff.tried(paid=True)
        rows = gradient.index_select(0, sent).to(wire_dtype(gradient.dtype))
        rows = yield allgather_async(rows, name=f"{self.name}.rows")
        put_rows(gradient, numbers, rows.mul_(self._scaling.before * self._scaling.after))

    def _send_sparse(self, table: torch.nn.Parameter) -> Steps:
        if table.grad is None:
            nothing = (
                table.new_zeros(self._sparse, 0, dtype=torch.int64),
                table.new_zeros(0, *table.shape[self._sparse :]),
            )
            table.grad = torch.sparse_coo_tensor(*nothing, table.shape, device=table.device)
        gradient = table.grad
        if gradient.is_sparse and gradient.sparse_dim() != self._sparse:
            gradient = gradient.to_dense()
        if not gradient.is_sparse:
            gradient = gradient.to_sparse(self._sparse)
        gradient = gradient.coalesce()
        numbers, values = gradient.indices().t().contiguous(), gradient.values()
        if not len(numbers):  # a mark, since some row has to be sent
            numbers = numbers.new_full((1, self._sparse), -1)
            values = values.new_zeros(1, *values.shape[1:])
        numbers = yield allgather_async(numbers, name=f"{self.name}.numbers")
        if self._too_many(numbers, values.dtype):
            yield from self.send_plainly()
            return
        values = yield allgather_async(values, name=f"{self.name}.rows")
        values.mul_(self._scaling.before * self._scaling.after)
        kept = numbers[:, 0] >= 0
        if not bool(kept.all()):
            numbers, values = numbers[kept], values[kept]
        self._sum = torch.sparse_coo_tensor(numbers.t(), values, gradient.shape)

    def _too_many(self, numbers: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether all ranks' rows together are more than can be gathered."""
        columns = self.parameters[0].shape[self._sparse or 1 :].numel()
        return len(numbers) * columns * dtype.itemsize > MOST_GATHERED_BYTES


def put_rows(gradient: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Set each row of ``gradient`` that is among ``numbers`` to the sum of its ``rows``.

    Args:
        gradient: Shape ``(n, ...)``.
        numbers: Indices of rows, shape ``(k,)``; they may repeat.
        rows: Shape ``(k, ...)``, of a type in which sums are made.
    """
    flat, rows = gradient.view(len(gradient), -1), rows.view(len(rows), -1)
    if flat.dtype == rows.dtype:
        sums, places = flat, numbers.to(torch.int64)
        sums[places] = 0
    else:
        numbers, places = torch.unique(numbers, return_inverse=True)
        sums = rows.new_zeros(len(numbers), rows.shape[1])
    add_at(sums, places, rows)
    if sums is not flat:
        flat[numbers.to(torch.int64)] = sums.to(flat.dtype)
