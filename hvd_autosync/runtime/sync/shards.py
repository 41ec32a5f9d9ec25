"""Shards of the parameter servers: what each rank owns without a barrier, and its steps.

Parameters are grouped in buckets, and each bucket is split into as many shares of about equal size
as there are ranks. So owners have the same bytes, and the same work at every moment of a backward.
A share is stepped whenever a gradient for it arrives, by an optimizer of the script's class, with
the script's options, that holds only the share; momentum and all other states are kept with it.
(Parameter servers with all ranks as servers; Li et al., OSDI 2014.)
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_autosync.runtime.exchange.buckets import split_evenly
from hvd_autosync.runtime.state.group_swap import own_class, steps_by_element
from hvd_autosync.runtime.state.partition import Part, Partition
from hvd_autosync.runtime.state.states import Entry
from hvd_autosync.search_space.protocol import push_count

#: What the constructors of torch's optimizers and of Horovod's set on each, and what ours sets.
_OF_WRAPPERS = frozenset(
    "defaults state param_groups _zero_grad_profile_name _warned_capturable_if_run_uncaptured "
    "_optimizer_step_pre_hooks _optimizer_step_post_hooks "
    "_optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks "
    "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks "
    "_compression _parameter_names backward_passes_per_step _allreduce_delay op "
    "gradient_predivide_factor sparse_as_dense process_set _handles _grad_accs _requires_update "
    "_synchronized _should_synchronize _groups _p_to_group _group_counts "
    "_sync _in_step".split()
)
#: Options of an optimizer that need parameters on a device.
_ON_DEVICES = frozenset({"capturable", "fused"})


class ServerBucket:
    """Parameters of one type, in the order in which their gradients arrive.

    Args:
        number: Its place among the buckets.
        partition: Which rank owns which elements of its parameters.

    Attributes:
        parameters: Its parameters.
        partition: As given.
        flat: This rank's gradients, ready to be pushed.
        pulled: The parameters as their owners have sent them last.
    """

    def __init__(self, number: int, partition: Partition) -> None:
        self.number = number
        self.parameters = partition.parameters
        self.partition = partition
        # Messages are read and written on the CPU, whatever the device of the parameters.
        self.flat = torch.zeros(sum(partition.shares), dtype=self.parameters[0].dtype, device="cpu")
        self.pulled = torch.zeros_like(self.flat)
        self._places = dict(zip(self.parameters, partition.split(self.flat), strict=True))
        self._pulled = partition.split(self.pulled)
        #: Versions of the parameters when the pulled values were last written to the model.
        self._written: list[int] = []

    def keep_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Copy the gradient of one parameter into ``flat``; zeros if it has none."""
        gradient = parameter.grad
        if gradient is None:
            self._places[parameter].zero_()
            return
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        self._places[parameter].copy_(dense.reshape(-1))

    def moved(self) -> bool:
        """Return whether a parameter was written since the last pull, except through ``.data``."""
        return self._written != [parameter._version for parameter in self.parameters]

    def untouched(self) -> bool:
        """Return whether the model's parameters equal the pulled ones.

        Parameters with NaN or infinity are skipped.
        """
        return all(
            torch.equal(parameter.detach().reshape(-1).cpu(), values) or not values.isfinite().all()
            for parameter, values in zip(self.parameters, self._pulled, strict=True)
        )

    @torch.no_grad()
    def take_pulled(self) -> None:
        """Write the pulled parameters to the model."""
        for parameter, values in zip(self.parameters, self._pulled, strict=True):
            parameter.detach().copy_(values.view(parameter.shape))
        self._written = [parameter._version for parameter in self.parameters]

    @torch.no_grad()
    def keep_parameters(self) -> None:
        """Set the pulled parameters to the model's."""
        for parameter, values in zip(self.parameters, self._pulled, strict=True):
            values.copy_(parameter.detach().reshape(-1))
        self._written = [parameter._version for parameter in self.parameters]


def make_buckets(
    optimizer: Any, order: Sequence[torch.nn.Parameter], ranks: int
) -> list[ServerBucket]:
    """Return the buckets of an optimizer's parameters.

    Args:
        optimizer: The wrapped optimizer.
        order: Its parameters, in the order in which gradients arrive; the same on all ranks.
        ranks: The number of ranks.
    """
    whole = sum(parameter.numel() * parameter.element_size() for parameter in order)
    by_element = steps_by_element(optimizer)
    buckets: list[ServerBucket] = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in order):
        own = [parameter for parameter in order if parameter.dtype is dtype]
        sizes = [parameter.numel() * parameter.element_size() for parameter in own]
        count = max(round(push_count(whole) * sum(sizes) / max(whole, 1)), 1)
        for group in split_evenly(sizes, count):
            members = [own[i] for i in group]
            cut = Partition.evenly if by_element else Partition.of_whole_tensors
            buckets.append(ServerBucket(len(buckets), cut(members, ranks)))
    return buckets


class Share:
    """This rank's share of one bucket, with the optimizer that steps it.

    Args:
        bucket: The bucket; its ``pulled`` has the current parameters.
        owner: This rank.
        optimizer: The wrapped optimizer, whose states are the same on all ranks now.

    Attributes:
        values: The current parameters.
        version: Number of steps made.
    """

    def __init__(self, bucket: ServerBucket, owner: int, optimizer: Any) -> None:
        partition = bucket.partition
        self.values = partition.share(owner, bucket.pulled).clone()
        self.version = 0
        self._gradient = torch.zeros_like(self.values)
        self._gradients = partition.split_share(owner, self._gradient)
        values = partition.split_share(owner, self.values)
        self._parts = [
            Part(piece, torch.nn.Parameter(own))
            for piece, own in zip(partition.pieces(owner), values, strict=True)
        ]
        self._present: set[int] = set()
        # Threads hold the shares, and must not keep an optimizer that the script has dropped.
        self._script = weakref.ref(optimizer)
        self._optimizer = self._like(optimizer)
        for part in self._parts:
            if state := optimizer.state.get(part.piece.whole):
                self._optimizer.state[part.values] = part.piece.cut_state(state, "cpu")

    def _like(self, optimizer: Any) -> Any:
        """Return an optimizer of the script's class for the parts, created as unpickling does."""
        part_of = {part.piece.whole: part.values for part in self._parts}
        groups = [
            {**group, "params": [part_of[each] for each in group["params"] if each in part_of]}
            for group in optimizer.param_groups
        ]
        cls = own_class(optimizer)
        own = cls.__new__(cls)
        # What its constructor has set, private or not; a step method there is a scheduler's.
        own.__dict__.update(
            (name, _rebound(value, optimizer, own))
            for name, value in vars(optimizer).items()
            if name not in _OF_WRAPPERS and not callable(getattr(cls, name, None))
        )
        own.__setstate__(
            {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups}
        )
        return own

    def entries(self, places: Mapping[torch.nn.Parameter, int]) -> list[Entry]:
        """Return the states of the parts, for other ranks to put together; not copied.

        Args:
            places: Parameter -> its place among those of the optimizer.
        """
        states = self._optimizer.state
        return [
            part.piece.entry(places[part.piece.whole], states[part.values])
            for part in self._parts
            if states.get(part.values)
        ]

    def add(self, gradient: torch.Tensor, absent: Collection[int] = ()) -> None:
        """Add to the gradient of the next step.

        Args:
            gradient: As long as the share.
            absent: Places in the bucket of parameters without a gradient.
        """
        self._gradient.add_(gradient)
        places = {part.piece.place for part in self._parts}
        self._present |= places.difference(absent)

    def step(self, rates: Sequence[float], momentum: float = 1.0, scale: float = 1.0) -> None:
        """Make a step with the accumulated gradient.

        Args:
            rates: The learning rate of each group of the script's optimizer.
            momentum: Factor of the momentum coefficient.
            scale: Factor of the gradient.
        """
        if scale != 1:
            self._gradient.mul_(scale)
        chosen = self._script()
        own_groups = self._optimizer.param_groups
        groups = own_groups if chosen is None else chosen.param_groups
        for own, group, rate in zip(own_groups, groups, rates, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
            own["lr"] = rate
            for name in _ON_DEVICES & own.keys():
                own[name] = False  # shares are in host memory
            if momentum != 1:
                _scale_momentum(own, momentum)
        for part, gradient in zip(self._parts, self._gradients, strict=True):
            part.values.grad = gradient if part.piece.place in self._present else None
        self._optimizer.step()
        self._gradient.zero_()
        self._present.clear()
        self.version += 1


def _rebound(value: Any, before: Any, now: Any) -> Any:
    """Return an attribute of ``before`` for ``now``: if it is a method of that, then of this."""
    if isinstance(value, types.MethodType) and value.__self__ is before:
        return types.MethodType(value.__func__, now)
    return value


def _scale_momentum(group: dict[str, Any], factor: float) -> None:
    if "momentum" in group:
        group["momentum"] *= factor
    elif "betas" in group:
        group["betas"] = (group["betas"][0] * factor, *group["betas"][1:])
