"""Which ranks are slow, and what is done about it."""
