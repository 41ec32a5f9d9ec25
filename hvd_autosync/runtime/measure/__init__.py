"""What is measured in a worker: steps, waiting, compute, losses, gradients."""
