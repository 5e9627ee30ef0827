"""Homes and indexes full of random tokens, with NaN wherever nothing is stored, and exact attention over some of them."""

from __future__ import annotations

import torch

from kvsupport.poison import poison


def make_home(lengths, *, heads=2, dim=64, chunk=2, layers=2, dtype=torch.float32):
    """A home in which every token that does not exist is NaN, block tables, and the K and V `[n, heads, dim]` of layer 1."""
    per_block, width = 64 // chunk, max(-(-n // 64) for n in lengths) + 1
    n_blocks = sum(-(-n // 64) for n in lengths) + 1
    home = poison(torch.zeros(n_blocks, layers, heads, per_block, 2, chunk, dim, dtype=dtype))
    blocks = torch.zeros(len(lengths), width, dtype=torch.int64)
    order, used, stored = 1 + torch.randperm(n_blocks - 1), 0, []
    for i, n in enumerate(lengths):
        count = -(-n // 64)
        blocks[i, :count] = order[used : used + count]
        used += count
        k, v = (torch.randn(n, heads, dim).to(dtype) for _ in range(2))
        at = torch.arange(n)
        block, place, inside = blocks[i, at // 64], at % 64 // chunk, at % chunk
        home[block, 1, :, place, 0, inside] = k
        home[block, 1, :, place, 1, inside] = v
        stored.append((k, v))
    return home, blocks, stored


def attend_some(q, k, v, tokens, scale, cap=0.0):
    """float64 attention of q `[G, D]` over some tokens of one head, k and v `[n, D]`; logits pressed under `cap`, if any."""
    logits = q.double() @ k[tokens].double().T * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return torch.softmax(logits, dim=-1) @ v[tokens].double()


def make_index(lengths, *, heads=2, dim=64, chunk=2, per_page=16, dtype=torch.float32):
    """Random groups over the chunks of some sequences, some of them empty.

    Returns:
        what `select_chunks` reads between q and `n_wanted`, and the groups of the longest sequence.
    """
    home, blocks, _ = make_home([n * chunk for n in lengths], heads=heads, dim=dim, chunk=chunk, dtype=dtype)
    members_per_page, vectors = per_page * 16 // chunk, 2 * chunk
    counts = [-(-n // members_per_page) for n in lengths]
    n_pages, slots_per_page = sum(counts) + 2, -(-per_page // vectors)
    shape = (n_pages, heads)
    slots = torch.randperm(n_pages * heads * slots_per_page).view(*shape, slots_per_page).int()
    arena = torch.randn(slots.numel(), 2, chunk, dim).to(dtype)
    begins, sizes = (torch.zeros(*shape, per_page, dtype=torch.int32) for _ in range(2))
    members = torch.full((*shape, members_per_page), -1, dtype=torch.int32)
    pages = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    order, used = torch.randperm(n_pages), 0
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = pages[i, :count] = order[used : used + count]
        used += count
        for h in range(heads):
            of_chunk = torch.randint(0, count * per_page, (n,))
            of_chunk[of_chunk == 3] = 4  # group 3 stays empty
            size = torch.bincount(of_chunk, minlength=count * per_page)
            sizes[mine, h] = size.view(count, per_page).int()
            begins[mine, h] = (size.cumsum(0) - size).view(count, per_page).int()
            listed = torch.full((count * members_per_page,), -1)
            listed[:n] = of_chunk.argsort(stable=True)
            members[mine, h] = listed.view(count, members_per_page).int()
    books = (arena, slots, begins, sizes, members, pages, torch.tensor(counts))
    return (*books, home, 1, blocks, torch.arange(len(lengths))), max(counts) * per_page
