"""How a worker reaches its driver: the variables it is told by, the lines that it sends."""
