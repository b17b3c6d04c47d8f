"""Frameworks that already have a training loop: one module each, imported by name only."""
