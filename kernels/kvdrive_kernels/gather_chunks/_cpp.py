"""`gather_chunks` in C++: gather_chunks.h."""

from __future__ import annotations


def gather_chunks(library, source, source_rows, target, target_slots) -> None:
    if source_rows.numel():
        library.gather_chunks(source, source_rows, target, target_slots)
