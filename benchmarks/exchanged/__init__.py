"""What the benchmarks of the runtime share: models, optimizers under a plan, counted bytes."""
