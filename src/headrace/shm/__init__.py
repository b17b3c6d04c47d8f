"""Shared memory between one writer and the ranks of a host: layout, segments, hand-over, ring, and who is alive."""
