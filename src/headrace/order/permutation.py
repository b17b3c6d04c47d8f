"""A shuffle that needs no memory: number i's new place is computed, not looked up.

A Feistel network whose halves are digits to the base ceil(sqrt(n)), so that it permutes a range hardly larger than n,
and cycle walking for the rest: what lands outside [0, n) is sent through again until it is inside, which stays a
bijection (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). This is a shuffle, not a cipher:
nobody's secret hangs on it.

The numbers are part of what a checkpoint means, so this is a format, fixed by golden values in the tests:

    keys    8 words of 64 bits, little-endian: BLAKE2b (64 bytes) of the ASCII text "headrace permutation 1: " + key
    round   (left, right) becomes (right, (left + mix(right xor word)) mod base), once per word
    mix     SplitMix64's finalizer (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014)
"""

from __future__ import annotations

import hashlib
import math
import struct

_WORDS = struct.Struct("<8Q")
_MASK = 2**64 - 1


class KeyedPermutation:
    """A bijection of [0, size), another one for every `key`. O(1) memory; about 5 us per number; any size up to 2**64.

    Numbers outside [0, size) have no meaning.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._words = _WORDS.unpack(hashlib.blake2b(f"headrace permutation 1: {key}".encode("ascii")).digest())
        self._digits = math.isqrt(size - 1) + 1 if size > 1 else 1

    def __call__(self, number: int) -> int:
        """Where `number` goes."""
        # The network covers fewer than 2 sqrt(size) + 1 numbers more than there are, so a second walk is rare.
        while (number := self._permute(number)) >= self._size:
            pass
        return number

    def _permute(self, number: int) -> int:
        digits = self._digits
        left, right = divmod(number, digits)
        for word in self._words:
            left, right = right, (left + _mix(right ^ word)) % digits
        return left * digits + right


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
