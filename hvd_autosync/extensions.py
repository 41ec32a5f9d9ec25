"""Extensions: knobs, exchanges and codecs added by users' files.

The variable ``HVD_AUTOSYNC_EXTENSIONS`` lists files, separated as in ``PATH``, that call
:func:`add_knob`, :func:`add_exchange` or :func:`add_codec`. They are loaded in the driver, which
builds the search spaces, and on every rank, which exchanges gradients.

:class:`Extensions` adds to the registry that it is given; the functions of this module add to that
of this process. This module imports only the modules that describe strategies, so that unused parts
cost nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.search_space import Knob
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES, ClassPlan, class_knob
from hvd_autosync.search_space.knob_spec import KnobSpec, LauncherOption, Variable
from hvd_autosync.search_space.registry import KnobRegistry

if TYPE_CHECKING:
    import torch

    from hvd_autosync.runtime.exchange.codecs import Codec
    from hvd_autosync.runtime.exchange.exchanges import Exchange, Scaling

    #: Makes an exchange; arguments: number of elements, a tensor of the same type and device,
    #: factors.
    MakeExchange: TypeAlias = Callable[[int, torch.Tensor, Scaling], Exchange]
    #: Makes a codec; arguments: plan of the class, number of elements, a tensor of the same type
    #: and device, number of ranks.
    MakeCodec: TypeAlias = Callable[[ClassPlan, int, torch.Tensor, int], Codec]

#: The variable that names the files, separated as in ``PATH``.
VARIABLE = "HVD_AUTOSYNC_EXTENSIONS"
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Extensions:
    """What users' files have added.

    Args:
        registry: The knobs, to which knobs and choices are added.

    Attributes:
        exchanges: The added exchanges by name, for the runtime.
        codecs: The added codecs by name, for the runtime.
        knobs: The names of added knobs.
    """

    def __init__(self, registry: KnobRegistry) -> None:
        self._registry = registry
        self.knobs: set[str] = set()
        self.exchanges: dict[str, MakeExchange] = {}
        self.codecs: dict[str, MakeCodec] = {}
        self._loaded: dict[Path, str] = {}
        #: The file of the function of each name of each kind; "": none, as of a notebook's.
        self._files: dict[tuple[str, str], str] = {}

    def add_knob(self, spec: KnobSpec) -> None:
        """Add a knob that sets one environment variable of each rank.

        At its default the variable is not set. If the user has set the variable, the knob is not
        tuned.

        Args:
            spec: The declaration, of an exact knob of the group ``horovod`` that sets a
                :class:`~hvd_autosync.search_space.knob_spec.Variable`. Its reader must read it when
                ``hvd.init()`` is called, or later: forked trials have imported torch and Horovod
                before it is set. If it is read at each initialization (``reread``), live trials
                can change it.

        Raises:
            SpaceError: A knob of that name exists, the knob is of another group, the declaration
                has a field of a wrong type, another knob sets the variable, or it has a cost.
        """
        if not isinstance(spec, KnobSpec):
            raise SpaceError(f"{spec!r:.200} declares no knob", hint="Make a KnobSpec.")
        if not isinstance(spec.knob, Knob):
            raise SpaceError(f"{spec.knob!r:.200} is no knob", hint="Make one with float_knob().")
        _check_name("a knob", spec.name)
        if spec.name.startswith(tuple(f"{each}_" for each in PARAMETER_CLASSES)):
            raise SpaceError(
                f"knob {spec.name} has a name like those of a class of parameters",
                hint=f"Choose one that does not begin with {', '.join(PARAMETER_CLASSES)}.",
            )
        _check_callable(f"applies of knob {spec.name}", spec.applies)
        _check_callable(f"narrow of knob {spec.name}", spec.narrow)
        if not isinstance(spec.sets, Variable):
            raise SpaceError(
                f"knob {spec.name} sets {spec.sets!r:.200}",
                hint="Let it set a Variable: an extension adds no options and no parts of a plan.",
            )
        variable = spec.sets.name
        if not isinstance(variable, str) or not _VARIABLE_NAME.fullmatch(variable):
            raise SpaceError(
                f"knob {spec.name} sets {variable!r:.200}", hint="Give the name of a variable."
            )
        for other in self._registry:
            if other.name != spec.name and variable in _variables(other):
                raise SpaceError(
                    f"knob {spec.name} sets {variable}, as knob {other.name} does",
                    hint="Choose another variable, or leave the knob out.",
                )
        if spec.knob.group != "horovod":
            raise SpaceError(
                f"knob {spec.name} is of the group {spec.knob.group!r}",
                hint="Give a knob that sets a variable the group 'horovod'.",
            )
        if spec.cost:
            raise SpaceError(
                f"knob {spec.name} says what it costs: {spec.cost!r:.200}",
                hint="Leave cost out: the cost model has no term for knobs of extensions.",
            )
        self._registry.add(spec)
        self.knobs.add(spec.name)

    def add_exchange(
        self, name: str, make: MakeExchange, classes: Sequence[str] = PARAMETER_CLASSES
    ) -> None:
        """Add an exchange, which must be exact.

        Args:
            name: The value of the knobs ``..._exchange``.
            make: Makes it for one bucket, on every rank.
            classes: The classes of parameters that may use it.

        Raises:
            SpaceError: Horovod, hvd_autosync or another file has an exchange of that name, or an
                argument has a wrong type.
        """
        self._add_choices("exchange", name, make, classes)
        self.exchanges[name] = make

    def add_codec(
        self, name: str, make: MakeCodec, classes: Sequence[str] = PARAMETER_CLASSES
    ) -> None:
        """Add a codec.

        Args:
            name: The value of the knobs ``..._codec``.
            make: Makes it for one bucket, on every rank.
            classes: The classes of parameters that may use it.

        Raises:
            SpaceError: hvd_autosync or another file has a codec of that name, or an argument has a
                wrong type.
        """
        self._add_choices("codec", name, make, classes)
        self.codecs[name] = make

    def _add_choices(
        self, attribute: str, name: str, make: Callable[..., object], classes: Sequence[str]
    ) -> None:
        _check_name(f"the {attribute}", name)
        _check_callable(f"the function that makes {attribute} {name!r}", make)
        if isinstance(classes, str) or not classes:
            raise SpaceError(
                f"{attribute} {name!r} is for the classes {classes!r}",
                hint=f"Give a list of some of {', '.join(PARAMETER_CLASSES)}.",
            )
        if name in self._registry.own_choices(attribute):
            raise SpaceError(f"{attribute} {name!r} exists already", hint="Choose another name.")
        self._check_new(attribute, name, make)
        for parameter_class in classes:
            self._registry.add_choice(class_knob(parameter_class, attribute), name)

    def _check_new(self, kind: str, name: str, make: Callable[..., object]) -> None:
        """Check that no other file has added that name.

        The same one may be loaded again: by name where the script imports it.
        """
        code = getattr(make, "__code__", None)
        own = "" if code is None else os.path.realpath(code.co_filename)
        own = own if Path(own).is_file() else ""
        file = self._files.get((kind, name), "")
        if file and own and file != own:
            raise SpaceError(
                f"{kind} {name!r} exists already: {file!r} has added it",
                hint="Choose another name.",
            )
        self._files[kind, name] = own

    def load(self) -> None:
        """Load each file in the variable once.

        Raises:
            ConfigurationError: A file cannot be loaded.
        """
        for text in os.environ.get(VARIABLE, "").split(os.pathsep):
            if text and (path := Path(text).resolve()) not in self._loaded:
                self._loaded[path] = _run(path)

    def check_unchanged(self) -> None:
        """Check that the loaded files are those that ranks will load.

        Raises:
            ConfigurationError: A file was changed or deleted since it was loaded.
        """
        for path, digest in self._loaded.items():
            if not path.is_file() or _digest(path) != digest:
                raise ConfigurationError(
                    f"{str(path)!r}, which {VARIABLE} names, was changed since it was loaded",
                    hint="Restart this process, such as the kernel of a notebook.",
                )

    def names(self) -> list[str]:
        """Return name and digest of each loaded file, on which studies with its knobs depend."""
        return [f"{path.name} {digest}" for path, digest in sorted(self._loaded.items())]


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name.strip():
        raise SpaceError(f"{what} has the name {name!r:.200}", hint="Give it a name.")


def _check_callable(what: str, value: object) -> None:
    if not callable(value):
        raise SpaceError(f"{what} is {value!r:.200}", hint="Give a function.")


def _variables(spec: KnobSpec) -> tuple[str, ...]:
    """Return the variables by which a knob is set."""
    if isinstance(spec.sets, Variable):
        return (spec.sets.name,)
    return spec.sets.variables if isinstance(spec.sets, LauncherOption) else ()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _run(path: Path) -> str:
    """Run a file and return its digest."""
    try:
        digest = _digest(path)
        name = f"hvd_autosync_extension_{digest}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("the file's name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except SpaceError as error:
        raise SpaceError(
            f"{error.message} (in {str(path)!r}, which {VARIABLE} names)", hint=error.hint
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"cannot load {str(path)!r}, which {VARIABLE} names: {type(error).__name__}: {error}",
            hint="List Python files that add knobs, exchanges or codecs.",
        ) from error
    return digest


#: What has been added to this process.
ADDED = Extensions(REGISTRY)
add_knob, add_exchange, add_codec = ADDED.add_knob, ADDED.add_exchange, ADDED.add_codec
load, check_unchanged, names = ADDED.load, ADDED.check_unchanged, ADDED.names
#: The added exchanges and codecs by name, for the runtime.
EXCHANGES, CODECS = ADDED.exchanges, ADDED.codecs
