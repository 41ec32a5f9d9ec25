"""The registry of patches: what this package replaces in torch, Horovod and numpy, and what for.

A script needs no changes because some functions of other packages are replaced in its process, each
only where a strategy or a trial needs it. :data:`PATCHES` lists all of them; nothing else assigns
to modules or classes of other packages. ``hvd-autosync doctor`` prints the table.

This module imports only the standard library, because workers and ``horovodrun`` load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hvd_autosync.util.private_names import TESTED_VERSIONS, is_newer

#: Returns what takes the place of its argument, which was there before.
Maker = Callable[[Any], Any]

#: Classes that had another name in earlier versions.
_EARLIER = {"torch.amp.GradScaler": "torch.cuda.amp.GradScaler"}  # before torch 2.3
_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One patch.

    Attributes:
        name: Its name.
        targets: What is replaced: dotted names, separated by blanks.
        used_in: The module that installs it, as a path in ``hvd_autosync/``.
        why: What it is for.
    """

    name: str
    targets: str
    used_in: str
    why: str

    @property
    def packages(self) -> list[str]:
        """The packages that it changes and whose tested versions are known."""
        roots = dict.fromkeys(target.partition(".")[0] for target in self.targets.split())
        return [root for root in roots if root in TESTED_VERSIONS]


PATCHES = (
    Patch(
        "strategy optimizer",
        "horovod.torch.DistributedOptimizer horovod.torch.optimizer.DistributedOptimizer",
        "runtime/install/activation.py",
        "optimizers exchange gradients as the strategy says, and their steps are timed",
    ),
    Patch(
        "optimizer broadcast",
        "horovod.torch.broadcast_optimizer_state horovod.torch.functions.broadcast_optimizer_state "
        "horovod.torch.elastic.state.broadcast_optimizer_state",
        "runtime/install/activation.py",
        "optimizers whose state is split or differs between ranks can be broadcast",
    ),
    Patch(
        "process sets",
        "horovod.torch.init horovod.torch.mpi_ops.init",
        "runtime/collectives/levels.py",
        "init() creates the process sets of two-level exchanges",
    ),
    Patch(
        "shared process sets",
        "horovod.torch.mpi_ops._basics._add_process_set_impl "
        "horovod.torch.mpi_ops._basics._remove_process_set_impl",
        "runtime/collectives/shared_sets.py",
        "the script can add and remove process sets that two-level exchanges have, too",
    ),
    Patch(
        "initialization",
        "horovod.torch.mpi_ops._basics.init",
        "runtime/collectives/initialization.py",
        "what init() was given is recorded, so that Horovod can be initialized again; "
        "live tuning of an elastic job starts over",
    ),
    Patch(
        "end of the process",
        "horovod.common.basics.atexit",
        "runtime/collectives/initialization.py",
        "a repeated init() registers no second shutdown(); installed for that moment",
    ),
    Patch(
        "standstill",
        "horovod.torch.mpi_ops.mpi_lib horovod.torch.mpi_ops._basics.MPI_LIB_CTYPES",
        "runtime/collectives/standstill.py",
        "other threads wait while Horovod is initialized again; installed for that moment",
    ),
    Patch(
        "operations without a name",
        "horovod.torch.mpi_ops._allreduce_async horovod.torch.mpi_ops._grouped_allreduce_async "
        "horovod.torch.mpi_ops._allgather_async horovod.torch.mpi_ops._grouped_allgather_async "
        "horovod.torch.mpi_ops._broadcast_async horovod.torch.mpi_ops._alltoall_async "
        "horovod.torch.mpi_ops._reducescatter_async "
        "horovod.torch.mpi_ops._grouped_reducescatter_async",
        "runtime/collectives/operation_names.py",
        "a script's operations without a name meet, however many of ours were started before",
    ),
    Patch(
        "join",
        "horovod.torch.join horovod.torch.mpi_ops.join",
        "runtime/collectives/over_horovod.py",
        "what counts steps is told when ranks join, and a trial that ends meanwhile is left",
    ),
    Patch(
        "join and shutdown",
        "horovod.torch.mpi_ops.mpi_lib.horovod_torch_join "
        "horovod.torch.mpi_ops.mpi_lib.horovod_torch_reset "
        "horovod.torch.mpi_ops._basics.MPI_LIB_CTYPES.horovod_shutdown",
        "runtime/collectives/over_horovod.py",
        "deferred steps are made before Horovod drops their operations",
    ),
    Patch(
        "losses",
        "torch.autograd.backward torch.amp.GradScaler.scale torch.amp.GradScaler.update",
        "runtime/patches/backward.py",
        "the loss of each step is recorded, unscaled, and backward is timed while profiling",
    ),
    Patch(
        "gradient weights",
        "torch.autograd.backward",
        "runtime/patches/gradient_weight.py",
        "gradients of batches of unequal sizes are weighted",
    ),
    Patch(
        "gradient scalers",
        "torch.amp.GradScaler.step torch.amp.GradScaler.update",
        "runtime/patches/scalers.py",
        "optimizers learn which steps a gradient scaler has skipped, and how its scale changes",
    ),
    Patch(
        "epochs",
        "torch.utils.data.DataLoader.__iter__ "
        "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
        "runtime/patches/epochs.py",
        "the ends of epochs are seen, and batches are counted",
    ),
    Patch(
        "evaluation",
        "torch.nn.Module.eval",
        "runtime/patches/evaluation.py",
        "a step of a trial in which the script evaluates is not measured",
    ),
    Patch(
        "end without clean-up",
        "os._exit",
        "runtime/patches/exits.py",
        "a training that is tuned in its own steps ends by itself, not by a failure",
    ),
    Patch(
        "first import of torch",
        "builtins.__import__",
        "runtime/install/hooks.py",
        "a forked trial has the number of threads that the script sets before it, and no longer",
    ),
    Patch(
        "end of MPI",
        "os._exit",
        "runtime/collectives/launcher_use.py",
        "a script that ends by it after its shutdown() ends no other rank under MPI",
    ),
    Patch(
        "failed operations",
        "horovod.common.exceptions.HorovodInternalError.__init__",
        "runtime/patches/exits.py",
        "a script that catches the failure of an operation and ends does not end by itself",
    ),
    Patch(
        "linear layers",
        "torch.nn.functional.linear",
        "runtime/patches/linear.py",
        "inputs and output gradients of watched layers are recorded",
    ),
    Patch(
        "normalization layers",
        "torch.nn.modules.batchnorm._NormBase.__init__ "
        "torch.nn.modules.batchnorm._NormBase.__setstate__",
        "runtime/state/normalization.py",
        "layers with running statistics are found without a search of all objects",
    ),
    Patch(
        "compilers",
        "torch._dynamo.callback.callback_handler.run_start_callbacks "
        "torch.jit.RecursiveScriptModule.__init__",
        "runtime/exchange/compiling.py",
        "deferred steps end before code reads parameters without Python's knowledge",
    ),
    Patch(
        "seeds",
        "random.seed random.Random numpy.random.seed numpy.random.default_rng "
        "numpy.random.RandomState torch.manual_seed torch.random.manual_seed "
        "torch.cuda.manual_seed torch.cuda.manual_seed_all torch.Generator",
        "runtime/patches/seeds.py",
        "random numbers of a quality trial follow from its seed",
    ),
    Patch(
        "launcher options",
        "horovod.runner.launch.argparse",
        "engine/job_line.py",
        "the parser of horovodrun has the --autosync options",
    ),
    Patch(
        "check of gloo",
        "horovod.runner.launch.gloo_built",
        "launch/driven_launcher.py",
        "a launcher that our driver starts does not import torch to learn what the driver knows",
    ),
    Patch(
        "check of mpi", "horovod.runner.launch.mpi_built", "launch/driven_launcher.py", "likewise"
    ),
    Patch(
        "shell of mpirun",
        "horovod.runner.mpi_run.os",
        "launch/driven_launcher.py",
        "mpirun ends with the driver that has started its launcher",
    ),
    Patch(
        "order of interfaces",
        "horovod.runner.launch.driver_service.get_common_interfaces",
        "launch/driven_launcher.py",
        "all launches of a job use the same network",
    ),
    Patch(
        "decoder of output",
        "horovod.runner.common.util.safe_shell_exec.codecs",
        "launch/driven_launcher.py",
        "a byte that is no UTF-8 does not end the output of its rank",
    ),
    Patch(
        "launcher",
        "horovod.runner.launch._run",
        "commands/flag.py",
        "horovodrun --autosync tunes the job before it runs it",
    ),
)


@dataclass
class _Place:
    """A replaced attribute: its owner, what was there, and what is there now."""

    owner: Any
    attribute: str
    before: Any
    now: Any

    @property
    def covered(self) -> bool:
        """Whether something else has replaced it since."""
        return vars(self.owner).get(self.attribute, _ABSENT) is not self.now

    def restore(self) -> None:
        if self.before is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.before)


@dataclass
class _Installed:
    places: list[_Place]
    undo: Callable[[], object] | None


#: By name, in the order of installation.
_installed: dict[str, _Installed] = {}


def install(name: str, *makers: Maker, undo: Callable[[], object] | None = None) -> None:
    """Install a patch of the table; nothing happens if it is installed.

    Args:
        name: Its name.
        makers: One for each target, in order, or one for all. A maker is called once for an object
            that several targets name.
        undo: Called when the patch has been uninstalled.
    """
    if name in _installed:
        return
    targets = _patch(name).targets.split()
    made: list[tuple[Maker, Any, Any]] = []
    places = []
    for target, maker in zip(targets, makers * (len(targets) // len(makers)), strict=True):
        path, _, attribute = target.rpartition(".")
        owner = _owner(path)
        present = getattr(owner, attribute)  # ctypes makes some attributes when they are read
        before = vars(owner).get(attribute, _ABSENT)
        same = (now for its, old, now in made if its is maker and old is present)
        now = next(same, _ABSENT)
        if now is _ABSENT:
            now = maker(present)
            made.append((maker, present, now))
        places.append(_Place(owner, attribute, before, now))
    for place in places:
        setattr(place.owner, place.attribute, place.now)
    _installed[name] = _Installed(places, undo)


def uninstall(name: str) -> bool:
    """Put back what was there before a patch.

    Returns:
        Whether the patch is not installed any more. It stays if something else, as another patch or
        the script, has replaced one of its targets since.
    """
    own = _installed.get(name)
    if own is None:
        return True
    if any(place.covered for place in own.places):
        return False
    for place in own.places:
        place.restore()
    del _installed[name]
    if own.undo is not None:
        own.undo()
    return True


def uninstall_all() -> list[str]:
    """Uninstall all patches, the last one first; returns the names of those that stay."""
    return [name for name in reversed(list(_installed)) if not uninstall(name)]


def is_installed(name: str) -> bool:
    """Return whether a patch is installed."""
    return _patch(name).name in _installed


def missing_targets() -> Iterator[tuple[str, Patch]]:
    """Targets that the installed packages lack, each with its patch; packages are imported.

    Packages that cannot be imported are left out.
    """
    for patch in PATCHES:
        for target in patch.targets.split():
            path, _, attribute = target.rpartition(".")
            try:
                import_module(path.partition(".")[0])
            except Exception:  # torch raises OSError where a library of it is missing
                continue
            try:
                found = hasattr(_owner(path), attribute)
            except (ImportError, AttributeError):
                found = False
            if not found:
                yield target, patch


def tested_here(package: str) -> str:
    """Return how the installed version compares with the tested one, in its first two numbers.

    Returns:
        ``"tested"``, ``"newer than tested"``, ``"older than tested"`` or ``"not installed"``.
    """
    try:
        own, tested = version(package), TESTED_VERSIONS[package]
    except PackageNotFoundError:
        return "not installed"
    if is_newer(own, tested):
        return "newer than tested"
    return "older than tested" if is_newer(tested, own) else "tested"


def _patch(name: str) -> Patch:
    return next(patch for patch in PATCHES if patch.name == name)


def _owner(path: str) -> object:
    """Return the module or object with a dotted name."""
    package, *rest = path.split(".")
    owner: object = import_module(package)
    so_far = package
    for name in rest:
        inside, so_far = so_far, f"{so_far}.{name}"
        if not hasattr(owner, name) and so_far in _EARLIER:
            return _owner(_EARLIER[so_far])
        # While horovod.torch is being imported, horovod has no attribute torch yet.
        owner = getattr(owner, name) if hasattr(owner, name) else _module(so_far, inside)
    return owner


def _module(name: str, inside: str) -> object:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise AttributeError(f"{inside} has no {name.rpartition('.')[2]}") from None
