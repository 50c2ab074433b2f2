"""X25519 (RFC 7748): two processes agree on a secret that somebody who only listens cannot know.

Python's integers take a different time for different numbers, so a key is used once.
"""

from __future__ import annotations

from typing import Final

BYTES: Final = 32
BASE: Final = (9).to_bytes(BYTES, "little")
_P: Final = 2**255 - 19
_A24: Final = 121665


def x25519(scalar: bytes, point: bytes) -> bytes:
    """Return the product of a secret and a public value; with `BASE`, the public value of a secret (RFC 7748, section 5)."""
    secret = int.from_bytes(scalar, "little") & ~7 & (2**255 - 1) | 2**254
    x_1 = int.from_bytes(point, "little") & (2**255 - 1)
    x_2, z_2, x_3, z_3, swapped = 1, 0, x_1, 1, 0
    for position in reversed(range(255)):
        bit = secret >> position & 1
        if swapped != bit:
            x_2, z_2, x_3, z_3 = x_3, z_3, x_2, z_2
        swapped = bit
        a, b, c, d = x_2 + z_2, x_2 - z_2, x_3 + z_3, x_3 - z_3
        aa, bb, da, cb = a * a % _P, b * b % _P, d * a % _P, c * b % _P
        e = aa - bb
        x_3, z_3 = (da + cb) ** 2 % _P, x_1 * (da - cb) ** 2 % _P
        x_2, z_2 = aa * bb % _P, e * (aa + _A24 * e) % _P
    if swapped:
        x_2, z_2 = x_3, z_3
    return (x_2 * pow(z_2, _P - 2, _P) % _P).to_bytes(BYTES, "little")
