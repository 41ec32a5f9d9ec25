"""Live trials: stretches of the running training, each under one strategy, in its own steps."""
