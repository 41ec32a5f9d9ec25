"""The knobs of the catalogue, a module for each family."""
