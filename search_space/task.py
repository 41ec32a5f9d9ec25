"""A task: the pair of a model's profile and a cluster's resources."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.records import Record
from hvd_autosync.search_space.resources import Resources


@dataclass(frozen=True)
class Task(Record):
    """A model on a cluster, the unit of transfer learning.

    Attributes:
        model: Profile of the model.
        resources: Resources of the cluster.
    """

    model: ModelProfile
    resources: Resources

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits: equal for the same shapes, layout, device and build."""
        identity = [self.model.identity(), self.resources.identity()]
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
