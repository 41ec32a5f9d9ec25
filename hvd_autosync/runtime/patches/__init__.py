"""Wrappers around functions of torch and Horovod, so that scripts need no changes."""
