"""The registry of knobs: the catalogue's and those of users' files, and what is made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.knob_spec import (
    Family,
    KnobSpec,
    LauncherOption,
    PlanField,
    PlanPart,
    Situation,
    Variable,
)
from hvd_autosync.search_space.knobs import EXACT_GROUPS, LOSSY_GROUPS, CategoricalKnob, Knob, Value
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.resources import Resources
from hvd_autosync.search_space.space import SearchSpace


class KnobRegistry:
    """Declarations of knobs by name, in the order of the catalogue.

    Args:
        families: The knobs of the catalogue.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self.families = tuple(families)
        specs = [spec for family in self.families for spec in family.specs]
        self._specs = {spec.name: spec for spec in specs}
        assert len(self._specs) == len(specs), "names of knobs are unique"
        self._own = dict(self._specs)

    def __iter__(self) -> Iterator[KnobSpec]:
        return iter(self._specs.values())

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> KnobSpec:
        """Return the declaration of the knob called ``name``.

        Raises:
            SpaceError: No knob has that name.
        """
        try:
            return self._specs[name]
        except KeyError:
            raise SpaceError(
                f"unknown knob {name!r}", hint=f"Known knobs are {', '.join(self._specs)}."
            ) from None

    def add(self, spec: KnobSpec) -> None:
        """Add a user's knob; a knob of the same user's name is replaced.

        Raises:
            SpaceError: The catalogue already has a knob of that name.
        """
        if spec.name in self._own:
            raise SpaceError(f"knob {spec.name!r} already exists", hint="Choose another name.")
        self._specs[spec.name] = spec

    def add_choice(self, name: str, choice: str) -> None:
        """Add ``choice`` to a categorical knob.

        Raises:
            SpaceError: No categorical knob has that name.
        """
        spec = self[name]
        if not isinstance(spec.knob, CategoricalKnob):
            raise SpaceError(f"knob {name} is not categorical", hint="Name a categorical knob.")
        if choice not in spec.knob.choices:
            knob = replace(spec.knob, choices=(*spec.knob.choices, choice))
            self._specs[name] = replace(spec, knob=knob)

    def own_choices(self, attribute: str) -> set[str]:
        """Return the choices of the catalogue for one attribute of all classes of parameters."""
        return {
            str(choice)
            for spec in self._own.values()
            if spec.name.endswith(f"_{attribute}")
            for choice in getattr(spec.knob, "choices", ())
        }

    @property
    def variables(self) -> dict[str, tuple[KnobSpec, Variable]]:
        """Knobs that set a variable, by name, each with its variable."""
        return {s.name: (s, s.sets) for s in self if isinstance(s.sets, Variable)}

    @property
    def options(self) -> list[tuple[KnobSpec, LauncherOption]]:
        """Knobs that are options of ``horovodrun``."""
        return [(s, s.sets) for s in self if isinstance(s.sets, LauncherOption)]

    def plan_fields(self, part: PlanPart, strategy: Mapping[str, Value]) -> dict[str, Value]:
        """Return the fields of one part of the plan that ``strategy`` sets, with their values.

        Knobs that it lacks are at their defaults where the value of another knob switches them on.

        Args:
            part: The part of the plan.
            strategy: Knob -> value. A knob that is not in the registry sets nothing.
        """
        fields: dict[str, Value] = {}
        for spec in self:
            target, condition = spec.sets, spec.knob.condition
            if not isinstance(target, PlanField) or target.part != part:
                continue
            if spec.name in strategy:
                fields[target.name] = strategy[spec.name]
            elif condition is not None and condition.holds(strategy):
                fields[target.name] = spec.knob.default
        return fields

    def space(
        self,
        model: ModelProfile,
        resources: Resources,
        *,
        held: Mapping[str, Value] | None = None,
        owned: Collection[str] = (),
        allow: Collection[str] = (),
        default_controller: str = "gloo",
    ) -> SearchSpace:
        """Return the knobs that can matter for this model on these resources.

        The arguments and errors are those of
        :func:`hvd_autosync.search_space.catalogue.build_space`.
        """
        for group in allow:
            if group not in LOSSY_GROUPS:
                raise SpaceError(
                    f"unknown group of lossy knobs {group!r}",
                    hint=f"Known groups are {', '.join(LOSSY_GROUPS)}.",
                )
        situation = Situation(model, resources, dict(held or {}), default_controller)
        groups = {*EXACT_GROUPS, *allow}
        fixed = self._fixed(situation)
        absent: set[str] = {*situation.held, *owned}
        knobs: list[Knob] = []
        for spec in self:
            knob = spec.narrow(spec.knob, situation) if spec.applies(situation) else None
            if knob is None:
                absent.add(spec.name)
                continue
            parent_gone = knob.condition is not None and knob.condition.knob in absent - {*fixed}
            if knob.name in absent or knob.group not in groups or parent_gone:
                absent.add(knob.name)
            else:
                knobs.append(knob)
        return SearchSpace(tuple(knobs), tuple(sorted(fixed.items())))

    def _fixed(self, situation: Situation) -> dict[str, Value]:
        """Return the held knobs of this job.

        Another library's variables are often set for all jobs of a cluster; where their knob does
        not apply, they are not part of the space.
        """
        variables = self.variables
        return {
            name: value
            for name, value in situation.held.items()
            if name not in variables
            or not variables[name][1].foreign
            or variables[name][0].applies(situation)
        }
