"""The part of torchtitan 0.3.0 that a dataloader meets, in our words, for tests without half a gigabyte of packages.

Where torchtitan is installed, the tests take it instead of this.
"""
