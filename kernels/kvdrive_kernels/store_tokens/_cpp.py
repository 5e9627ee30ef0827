"""`store_tokens` in C++: store_tokens.h."""

from __future__ import annotations


def store_tokens(library, pool, rows, offset, inside, k, v) -> None:
    library.store_tokens(pool, rows, offset, inside, k, v)
