"""A trial in one rank: its run, its end, the probe of links, the summary of a run."""
