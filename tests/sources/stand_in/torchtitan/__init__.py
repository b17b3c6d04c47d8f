"""The part of torchtitan 0.3.0 that a dataloader meets, in our words, for tests without half a gigabyte of packages.

The real one was run by hand with the same adapter; see docs/feed.md.
"""
