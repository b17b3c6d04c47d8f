"""Hypothesis: the same examples in every run, and no test fails because the machine was slow."""

from hypothesis import settings

settings.register_profile("headrace", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("headrace")
