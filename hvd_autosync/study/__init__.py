"""Studies: the next action, as a function of the settings and of the trials so far."""
