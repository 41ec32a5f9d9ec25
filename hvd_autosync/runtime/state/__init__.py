"""States of optimizers and replicas: cut, put together, swapped, made equal."""
