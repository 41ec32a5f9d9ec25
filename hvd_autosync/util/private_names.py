"""Names of other packages that those do not document, and that a new version may change.

Names that are replaced are in the registry of patches (:mod:`hvd_autosync.util.patches`) instead.
``hvd-autosync doctor`` checks that the installed versions have them. A test compares the table with
a search of our sources (``tests/util/test_private_names.py``), so it is complete.

Horovod's documented names are those of ``horovod.torch``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

#: The newest versions in which the names were checked and the tests were run.
TESTED_VERSIONS = {
    "torch": "2.13.0",
    "horovod": "0.28.1",
    "ipykernel": "7.4.0",
    "numpy": "2.4.6",
    "cloudpickle": "3.1.3",
}


@dataclass(frozen=True)
class PrivateNames:
    """Some names of one module or class.

    Attributes:
        owner: The module, or the class or object in it; it starts with the package.
        names: Its attributes, separated by blanks.
        used_in: Our modules that use them, as paths in ``hvd_autosync/``.
        why: What they are used for.
        since: The first version that has them, if the use is for later versions only.
    """

    owner: str
    names: str
    used_in: tuple[str, ...]
    why: str
    since: str = ""

    @property
    def package(self) -> str:
        """The package, as it is imported and installed."""
        return self.owner.partition(".")[0]

    @property
    def dotted(self) -> list[str]:
        """Each name with its owner."""
        return [f"{self.owner}.{name}" for name in self.names.split()]


PRIVATE_NAMES = (
    PrivateNames(
        "torch",
        "_foreach_add_ _foreach_copy_ _foreach_mul_ _foreach_sub_",
        (
            "runtime/exchange/buckets.py",
            "runtime/exchange/zero_bucket.py",
            "runtime/guard/snapshots.py",
            "runtime/stragglers/membership.py",
            "runtime/sync/averaging.py",
        ),
        "one call for many tensors",
    ),
    PrivateNames(
        "torch.Tensor",
        "_indices",
        ("runtime/measure/profiler.py",),
        "the touched rows of a sparse gradient that is not coalesced",
    ),
    PrivateNames(
        "torch.Tensor",
        "_version _is_view",
        (
            "runtime/exchange/changed_gradients.py",
            "runtime/exchange/deferred_update.py",
            "runtime/exchange/own_gradients.py",
            "runtime/sync/shards.py",
        ),
        "whether a tensor was changed in place, and whether another one counts with it",
    ),
    PrivateNames(
        "torch.UntypedStorage",
        "_cdata",
        ("runtime/exchange/reaching.py",),
        "the memory whose users are counted",
    ),
    PrivateNames(
        "torch._C",
        "_storage_Use_Count",
        ("runtime/exchange/reaching.py",),
        "whether other tensors share a parameter's memory",
    ),
    PrivateNames(
        "torch._C",
        "_current_graph_task_id",
        (
            "runtime/patches/backward.py",
            "runtime/patches/gradient_weight.py",
            "runtime/patches/linear.py",
        ),
        "which backward pass runs, and whether inside another",
    ),
    PrivateNames(
        "torch._C",
        "_autograd._top_saved_tensors_default_hooks _functorch.is_legacy_batchedtensor "
        "_functorch.peek_interpreter_stack _get_tracing_state _len_torch_dispatch_stack",
        ("runtime/patches/linear.py",),
        "calls of linear layers that must not be watched",
    ),
    PrivateNames(
        "torch._C",
        "DisableTorchFunctionSubclass",
        ("runtime/measure/step_classifier.py",),
        "shapes of parameters whose steps wait, without making these",
    ),
    PrivateNames(
        "torch._C._autograd",
        "_get_current_graph_task_keep_graph",
        ("runtime/patches/linear.py",),
        "whether a graph may be passed again, whose inputs must be held",
        since="2.6",
    ),
    PrivateNames(
        "torch._dynamo.convert_frame",
        "FRAME_COUNTER",
        ("runtime/exchange/compiling.py",),
        "whether torch.compile has compiled anything",
    ),
    PrivateNames(
        "torch.amp.GradScaler",
        "_growth_tracker",
        ("runtime/patches/scalers.py",),
        "steps since the loss scale has changed: an entry of a scaler's state",
        since="2.3",
    ),
    PrivateNames(
        "torch.jit._builtins",
        "_get_builtin_table _register_builtin",
        ("runtime/patches/linear.py",),
        "a watched linear() can still be compiled by torch.jit",
    ),
    PrivateNames(
        "torch.nn.Module",
        "_parameters",
        ("runtime/exchange/reaching.py",),
        "the dictionary that a watched one replaces",
    ),
    PrivateNames(
        "torch.nn.modules.batchnorm",
        "_NormBase",
        ("runtime/state/normalization.py",),
        "the class of all layers with running statistics",
    ),
    PrivateNames(
        "torch.optim.Optimizer",
        "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        ("runtime/state/group_swap.py",),
        "whether hooks of the script see the gradients of a step",
    ),
    PrivateNames(
        "torch.optim.optimizer",
        "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
        ("runtime/state/group_swap.py",),
        "the same, for hooks of all optimizers",
    ),
    PrivateNames(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "_num_yielded",
        ("runtime/patches/epochs.py", "runtime/stragglers/dynamic_batching.py"),
        "how many batches an iterator has yielded",
    ),
    PrivateNames(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "_sampler_iter",
        ("runtime/stragglers/batch_split.py",),
        "the source of batch indices that a split batch replaces",
    ),
    PrivateNames(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "_send_idx",
        ("runtime/stragglers/batch_split.py",),
        "how many batches the loader's workers were given",
    ),
    PrivateNames(
        "horovod.torch.mpi_ops",
        "_basics._get_process_set_ids_and_ranks _basics.init _basics.is_initialized",
        ("runtime/collectives/initialization.py",),
        "what Horovod was initialized with, and is again",
    ),
    PrivateNames(
        "horovod.torch.mpi_ops",
        "_handle_map",
        ("runtime/collectives/over_horovod.py", "runtime/collectives/standstill.py"),
        "operations under way",
    ),
    PrivateNames(
        "horovod.runner.launch",
        "argparse.ArgumentParser parse_args",
        ("engine/job_line.py",),
        "the options of horovodrun",
    ),
    PrivateNames(
        "horovod.runner.launch",
        "run_commandline",
        ("launch/command.py",),
        "horovodrun in a process of its own",
    ),
    PrivateNames(
        "horovod.runner.common.util.config_parser",
        "set_env_from_args",
        ("engine/job_line.py",),
        "the variables that horovodrun sets",
    ),
    PrivateNames(
        "horovod.runner.common.util.hosts",
        "HostInfo get_host_assignments parse_host_files",
        ("engine/job_line.py", "launch/rendezvous.py"),
        "the hosts of a job, and the ranks on them",
    ),
    PrivateNames(
        "horovod.runner.gloo_run",
        "create_slot_env_vars",
        ("launch/rendezvous.py",),
        "the variables of each rank",
    ),
    PrivateNames(
        "horovod.runner.http.http_server",
        "RendezvousHTTPServer RendezvousHandler",
        ("runtime/collectives/rendezvous_server.py",),
        "the rendezvous of a warm trial, and of a re-initialization",
    ),
    PrivateNames(
        "horovod.runner.util.lsf.LSFUtils",
        "using_lsf",
        ("engine/job_line.py",),
        "whether hosts come from LSF",
    ),
    PrivateNames(
        "horovod.runner.util.network",
        "filter_local_addresses",
        ("launch/remote.py",),
        "which hosts are not this one",
    ),
    PrivateNames(
        "horovod.runner.util.remote",
        "get_remote_command",
        ("launch/remote.py",),
        "the ssh line of a command on another host",
    ),
    PrivateNames(
        "horovod.torch.mpi_ops",
        "_allgather_async _alltoall_async",
        ("runtime/collectives/over_horovod.py",),
        "allgather and alltoall into existing tensors",
    ),
    PrivateNames(
        "horovod.torch.mpi_ops",
        "_allreduce_async",
        ("runtime/collectives/over_horovod.py",),
        "an allreduce, without a look at deprecated arguments",
    ),
    PrivateNames(
        "horovod.torch.mpi_ops",
        "is_homogeneous",
        ("runtime/collectives/over_horovod.py",),
        "whether all hosts have the same number of ranks",
    ),
    PrivateNames(
        "horovod.torch.optimizer._DistributedOptimizer",
        "_allreduce_delay _allreduce_grad_async _grad_accs _handles _parameter_names "
        "_register_hooks _requires_update _should_synchronize _synchronized load_state_dict step "
        "synchronize zero_grad",
        (
            "runtime/exchange/deferred_update.py",
            "runtime/live/attach.py",
            "runtime/measure/profiler.py",
            "runtime/optimizer/horovods_exchange.py",
            "runtime/optimizer/optimizer.py",
            "runtime/optimizer/strategy_optimizer.py",
            "runtime/sync/equal_states.py",
            "runtime/sync/no_barrier.py",
            "runtime/sync/phases.py",
            "runtime/sync/suitability.py",
            "runtime/sync/synchronizer.py",
        ),
        "Horovod's optimizer, four methods of which a strategy replaces",
    ),
    PrivateNames(
        "cloudpickle.cloudpickle",
        "_DYNAMIC_CLASS_TRACKER_BY_ID",
        ("launch/function.py",),
        "a function of a notebook is the same job in each kernel",
    ),
    PrivateNames(
        "ipykernel.comm.comm.BaseComm",
        "_reply_subshell_id",
        ("reporting/widget.py",),
        "the Stop button is answered while the cell is busy",
        since="7.4",
    ),
    PrivateNames(
        "argparse.ArgumentParser",
        "_option_string_actions",
        ("engine/job_line.py",),
        "the options among which a misspelt one is looked up",
    ),
)


def missing_names() -> Iterator[tuple[str, PrivateNames]]:
    """Names that the installed packages lack, each with its row of the table.

    The packages are imported; Horovod is not started. What cannot be imported at all is left out.
    """
    for row in PRIVATE_NAMES:
        try:
            import_module(row.package)
            if row.since and is_newer(row.since, version(row.package)):
                continue
        except Exception:  # torch raises OSError where a library of it is missing
            continue
        yield from ((name, row) for name in row.dotted if not _exists(name))


def untested(package: str) -> bool:
    """Return whether the installed version is newer than the tested, in its first two numbers."""
    try:
        return is_newer(version(package), TESTED_VERSIONS[package])
    except PackageNotFoundError:
        return False


def is_newer(one: str, other: str) -> bool:
    """Return whether one version is newer than another, in its first two numbers."""
    first, second = ([int(n) for n in re.findall(r"\d+", text)[:2]] for text in (one, other))
    return first > second


def _exists(dotted: str) -> bool:
    package, *rest = dotted.split(".")
    path = package
    owner: Any = import_module(package)
    for name in rest:
        path += f".{name}"
        try:
            owner = getattr(owner, name) if hasattr(owner, name) else import_module(path)
        except Exception:
            return isinstance(owner, type) and path == dotted and _instances_have(owner, name)
    return True


def _instances_have(cls: type, name: str) -> bool:
    """Return whether a class declares an attribute of its instances, or a method mentions it."""
    for each in cls.__mro__:
        methods = (value for value in vars(each).values() if isinstance(value, FunctionType))
        if name in vars(each).get("__annotations__", ()):
            return True
        if any(name in method.__code__.co_names for method in methods):
            return True
    return False
