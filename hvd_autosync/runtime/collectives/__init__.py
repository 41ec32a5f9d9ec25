"""What ranks do together, over Horovod's operations and beside them, and messages between them."""
