"""A trial in one rank: its run, its end, the probe of links, what a run comes to."""
