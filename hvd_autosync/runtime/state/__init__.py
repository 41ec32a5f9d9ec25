"""States of optimizers and replicas: encoding, merging, swapping, synchronizing."""
