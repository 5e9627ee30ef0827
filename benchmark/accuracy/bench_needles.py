"""A fact planted in real text: does sparse decoding still say it? Chunk sizes and budgets on the same prefill.

    python -m benchmark.accuracy.bench_needles [--tokens 3000 6800] [--depths 0.3 0.7]

Teacher-forced: the log-probability of the right answer, per token, and whether every token of it was the most likely one.
The question is part of the prompt, so it is read with full attention; only the answer is decoded sparsely.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from sglang_kvdrive.cli.model import default_dir
from sglang_kvdrive.config import Budget, KVDriveConfig
from transformers import AutoTokenizer

from benchmark.common.llama import Llama, Prompt
from benchmark.common.record import record

CITIES = ("Lisbon", "Oslo", "Quito", "Cairo", "Lima", "Hanoi", "Accra", "Riga")
EXACT = KVDriveConfig(dense_below=1 << 20)


def settings() -> dict[str, KVDriveConfig]:
    found = {"full attention": EXACT}
    for budget in ("512tok", "192tok"):
        for chunk_size in (4, 2, 1):
            config = KVDriveConfig(budget=Budget.parse(budget), chunk_size=chunk_size)
            found[f"{budget}, chunk {chunk_size}"] = config
    return found


def question(tokenizer, haystack: list[int], depth: float, city: str, number: int) -> list[int]:
    """Token ids of a chat prompt that ends where the number must follow."""
    at = int(len(haystack) * depth)
    needle = tokenizer(f"\n\nThe special magic number for {city} is {number}.\n\n")["input_ids"]
    text = tokenizer.decode(haystack[:at] + needle + haystack[at:])
    text += f"\n\nWhat is the special magic number for {city} mentioned in the text above? Answer with the number."
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    return tokenizer(chat + f"The special magic number for {city} is")["input_ids"]


@torch.no_grad()
def answer(model: Llama, prompt: Prompt, config: KVDriveConfig, gold: list[int]) -> dict:
    decoder = model.decoder(prompt, config, len(gold))
    logits, loss, exact = prompt.logits, 0.0, True
    for token in gold:
        scores = torch.log_softmax(logits, -1)
        loss -= float(scores[token])
        exact &= int(scores.argmax()) == token
        logits = decoder.step(token)
    stats = decoder.engine.stats
    attended = stats.attended_entries / stats.stored_entries
    return {"nll_per_token": loss / len(gold), "exact": exact, "attended_share": attended, "seal_s": stats.seal_us / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_dir())
    parser.add_argument("--tokens", type=int, nargs="+", default=[3000, 6800])
    parser.add_argument("--depths", type=float, nargs="+", default=[0.2, 0.5, 0.8])
    arguments = parser.parse_args()
    tokenizer, model = AutoTokenizer.from_pretrained(arguments.model), Llama(arguments.model)
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text[:600_000])["input_ids"]
    cases = [(n, depth) for n in arguments.tokens for depth in arguments.depths]
    for case, (n_tokens, depth) in enumerate(cases):
        number, city = 4172839 + case * 99173, CITIES[case % len(CITIES)]
        prompt_ids = question(tokenizer, ids[case * 7000 : case * 7000 + n_tokens], depth, city, number)
        with torch.no_grad():
            prompt = model.read(torch.tensor(prompt_ids))
        gold = tokenizer(f" {number}")["input_ids"]
        for name, config in settings().items():
            row = answer(model, prompt, config, gold)
            record(
                "needles",
                setting=name,
                prompt_tokens=len(prompt_ids),
                depth=depth,
                number=number,
                model=arguments.model.name,
                **row,
            )
            print(
                f"{len(prompt_ids):5} tokens, depth {depth:.1f}, {name:16} nll {row['nll_per_token']:.3f} exact {row['exact']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
