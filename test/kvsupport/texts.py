"""Prompts of any length in ordinary English: a small model's choices are clear on them, unlike on random tokens."""

from __future__ import annotations

import random
from functools import cache

_WHO = ("The baker", "A sailor", "The old doctor", "My sister", "The engineer", "A farmer", "The teacher", "Their neighbour")
_DID = ("counted", "painted", "lost", "repaired", "sold", "carried", "borrowed", "described")
_WHAT = ("wooden chairs", "blue lanterns", "apples", "heavy books", "clocks", "letters", "glass bottles", "maps")
_WHERE = ("near the harbour", "in the garden", "behind the mill", "at the station", "on the hill", "under the bridge")

PASSAGE = (
    "The river Aldo rises in the northern hills and flows past three towns before it reaches the sea. The first town, Brenn, "
    "is known for its paper mills. The second, Carsow, has a bridge of nine stone arches that was finished in 1764. The third, "
    "Dunmar, is a fishing port where every autumn a fair is held on the long quay. Boats carry grain down the river and bring "
    "salt and iron back. In dry summers the water is so low that the boats must wait for weeks below the bridge.\n\n"
)
"""About 110 tokens: longer than what is always attended, so that an answer needs index, selection and window."""


@cache
def tokenizer():
    """Of the small model."""
    from sglang_kvdrive.cli.model import ensure_smollm2
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ensure_smollm2() / "tokenizer.json"))


def token_ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def story(n_tokens: int, seed: int = 0) -> list[int]:
    """Exactly `n_tokens` token ids of a story that never repeats a sentence."""
    draw = random.Random(seed)
    ids: list[int] = []
    day = 1
    while len(ids) < n_tokens:
        who, did, what, where = (draw.choice(words) for words in (_WHO, _DID, _WHAT, _WHERE))
        ids += token_ids(f"On day {day}, {who.lower()} {did} {draw.randint(2, 99)} {what} {where}. ")
        day += 1
    return ids[:n_tokens]


def secret_prompt(n_tokens: int, name: str, code: int, seed: int = 0) -> list[int]:
    """About `n_tokens` ids: a code at the beginning, a story, and at the end the question for the code."""
    begin = token_ids(f"The secret code of {name} is {code}. ")
    end = token_ids(f"\nQuestion: What is the secret code of {name}?\nAnswer: The secret code of {name} is")
    return begin + story(max(0, n_tokens - len(begin) - len(end)), seed) + end


def instruction_last(n_tokens: int, code: int, seed: int = 0) -> list[int]:
    """Exactly `n_tokens` ids whose last few are the only instruction."""
    end = token_ids(f"\nRepeat after me: {code}, {code}, {code},")
    return story(n_tokens - len(end), seed) + end
