"""Arithmetic of launches on the host: Triton's own functions of these names serve kernels too, and take 5 µs a call."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """⌈a/b⌉.

    >>> cdiv(7, 3), cdiv(6, 3)
    (3, 2)
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> next_power_of_2(1), next_power_of_2(5), next_power_of_2(8)
    (1, 8, 8)
    """
    return 1 << (n - 1).bit_length()
