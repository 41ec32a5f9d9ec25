"""Measured links of clusters; each function runs in the caller's transaction."""

from __future__ import annotations

import contextlib

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from hvd_autosync.search_space import Links
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.schema import CLUSTERS


def find_links(connection: Connection, cluster_key: str) -> Links | None:
    """Return a cluster's last measured links; ``None`` if there are none, or damaged ones."""
    query = select(CLUSTERS.c.links).where(CLUSTERS.c.cluster_key == cluster_key)
    links = connection.execute(query).scalar()
    try:
        return None if links is None else Links.from_json(links)
    except ValueError:
        return None


def keep_links(connection: Connection, cluster_key: str, links: Links) -> None:
    """Write the measured links of a cluster, in place of earlier ones."""
    same_key = CLUSTERS.c.cluster_key == cluster_key
    values = {"measured_at": timestamp(), "links": links.to_json()}
    if connection.execute(CLUSTERS.update().where(same_key).values(**values)).rowcount:
        return
    # Another driver may store the same links at this moment; its measurement is as good.
    with contextlib.suppress(IntegrityError), connection.begin_nested():
        connection.execute(CLUSTERS.insert().values(cluster_key=cluster_key, **values))
