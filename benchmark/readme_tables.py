"""Write the README's measured tables from `results/*.jsonl`, so that no number in them is typed.

python -m benchmark.readme_tables           # rewrites README.md between its markers
python -m benchmark.readme_tables --check   # exit code 1 if the README says something else
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmark.common.record import RESULTS

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def rows(name: str) -> list[dict]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def last_run(name: str) -> list[dict]:
    """Rows that the last command wrote: times of different runs are never compared."""
    found = rows(name)
    return [row for row in found if (row["commit"], row["command"]) == (found[-1]["commit"], found[-1]["command"])]


def needles() -> str:
    """A planted fact, by setting."""
    found: dict[str, list[dict]] = {}
    for row in rows("needles"):
        found.setdefault(row["setting"], []).append(row)
    if not found:
        return ""
    lines = ["| attended beside sink, local, pending | facts said exactly | mean NLL per token of the answer | attended |",
             "|---|---|---|---|"]  # fmt: skip
    for setting, results in found.items():
        exact, total = sum(row["exact"] for row in results), len(results)
        nll = statistics.mean(row["nll_per_token"] for row in results)
        share = statistics.mean(row["attended_share"] for row in results)
        lines.append(f"| {setting} | {exact} of {total} | {nll:.3f} | {100 * share:.0f}% |")
    first = rows("needles")[0]
    tokens = sorted({row["prompt_tokens"] for row in rows("needles")})
    head = (
        f"A fact planted in reference prose, asked for at the end ({first['model']}, prompts of {tokens[0]:,} to "
        f"{tokens[-1]:,} tokens, teacher-forced answers, the same exact prefill for all rows; "
        "`benchmark/accuracy/bench_needles.py`). Few samples: read it as an order, not as a score.\n\n"
    )
    return head + "\n".join(lines)


def steps() -> str:
    """A decode step through the server beside stock."""
    found = last_run("step")
    if not found:
        return ""
    last = {(row["tokens"], row["manager"]): row for row in found}
    first = found[-1]
    lines = ["| tokens | stock step | kvdrive step | ratio | stock first token | kvdrive first token | attended |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for tokens in sorted({row["tokens"] for row in found}):
        stock, ours = last[tokens, "stock"], last[tokens, "kvdrive"]
        first_s = stock["first_token_ms"] / 1e3, ours["first_token_ms"] / 1e3
        lines.append(
            f"| {tokens:,} | {stock['step_ms']:.0f} ms | {ours['step_ms']:.0f} ms | {stock['step_ms'] / ours['step_ms']:.2f} | "
            f"{first_s[0]:.1f} s | {first_s[1]:.1f} s | {100 * ours['attended_share']:.0f}% |"
        )
    head = (
        f"One request through the server, beside stock SGLang `torch_native`, interleaved in one run ({first['cpu']}, two cores, "
        f"SmolLM2-135M {first['dtype']}, defaults{' with `' + first['flags'] + '`' if first['flags'] else ''}; "
        "`benchmark/system/bench_step.py`).\n\n"
    )
    return head + "\n".join(lines)


def decodes() -> str:
    """A decode step of the model runner beside stock and beside ourselves attending everything."""
    found = last_run("decode")
    if not found:
        return ""
    last = {(row["batch"], row["tokens"], row["manager"]): row["step_ms"] for row in found}
    lines = ["| requests x tokens | stock | kvdrive, everything attended | kvdrive | beside stock | beside everything |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for batch, tokens in sorted({(row["batch"], row["tokens"]) for row in found}):
        stock, dense, ours = (last[batch, tokens, name] for name in ("stock", "dense", "kvdrive"))
        times = " | ".join(f"{ms:.0f} ms" for ms in (stock, dense, ours))
        lines.append(f"| {batch} x {tokens:,} | {times} | {stock / ours:.1f} | {dense / ours:.1f} |")
    head = (
        f"A decode step without a server, all three fed with the same tokens in turns ({found[-1]['cpu']}, two cores, "
        f"SmolLM2-135M {found[-1]['dtype']}, stretched to 32K tokens by rope scaling; `benchmark/system/bench_decode.py`).\n\n"
    )
    return head + "\n".join(lines)


def main() -> int:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    tables = "\n\n".join(part for part in (needles(), steps(), decodes()) if part)
    written = f"{before}{BEGIN}\n{tables}\n{END}{after}"
    if "--check" in sys.argv:
        return int(written != text)
    README.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
