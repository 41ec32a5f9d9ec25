"""What a study does next, as a function of its settings and of the trials so far."""
