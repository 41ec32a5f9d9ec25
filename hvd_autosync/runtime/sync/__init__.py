"""When ranks wait for each other: local steps, phases with and without a barrier."""
