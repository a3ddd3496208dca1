"""Write the tables of jobs beside vLLM.

A row of the file has a model, a job and a side ("vllm" or "ours"). It also has the new tokens at most, those of a
picture on average, and "ms". Captions also have "pictures/s".
"""

from __future__ import annotations

from documents import Document, Row, digits, grid, load, measured_at, title

FILE = "beside_vllm.json"
CAPTIONING = "captioning"
LABELS = {
    CAPTIONING: "256 captions, pictures a second",
    "captioning, unequal lengths": "256 captions of unequal lengths, pictures a second",
    "captioning many, unequal lengths": "1024 captions of unequal lengths, pictures a second",
}
"""Of captions; other jobs are calls of `generate`."""
Sides = dict[str, Row]
"""The rows of a job by side."""


def jobs(document: Document) -> dict[tuple[str, str, int], Sides]:
    """Return the jobs that both sides ran, by model, name and number of new tokens."""
    by_key: dict[tuple[str, str, int], Sides] = {}
    for row in document["rows"]:
        by_key.setdefault((row["model"], row["job"], row["tokens"]), {})[row["side"]] = row
    return {key: sides for key, sides in by_key.items() if len(sides) == 2}


def both_sides(sides: Sides) -> tuple[str, str, str]:
    """Write vLLM's time or rate, ours, and how many times as fast as vLLM ours is."""
    vllm = sides["vllm"]
    ours = sides["ours"]
    if "pictures/s" in ours:
        rates = vllm["pictures/s"], ours["pictures/s"]
        return digits(rates[0]), digits(rates[1]), f"{rates[1] / rates[0]:.2f}x"
    return f"{digits(vllm['ms'])} ms", f"{digits(ours['ms'])} ms", f"{vllm['ms'] / ours['ms']:.2f}x"


def name(document: Document) -> str:
    """Name vLLM with its version."""
    return f"vLLM {document['versions'].get('vllm', '')}".rstrip()


def beside_vllm(document: Document) -> str:
    """Write all jobs, for docs/benchmarks.md."""
    rows = []
    for (model, job, tokens), sides in jobs(document).items():
        vllm, ours, ratio = both_sides(sides)
        mean = sides["ours"]["tokens of a picture"]
        new_tokens = str(tokens) if mean == tokens else f"up to {tokens}, {mean:.0f} on average"
        rows.append([title(model), LABELS.get(job, f"one call, {job}"), new_tokens, vllm, f"{ours} ({ratio})"])
    return grid(["", "job", "new tokens", name(document), "`patch`, `graphed_decoding`"], rows)


def captions_alone(document: Document) -> str:
    """Write the captions a second of our side alone."""
    rows = []
    for row in document["rows"]:
        rows.append([title(row["model"]), str(row["tokens"]), digits(row["pictures/s"]), f"{row['GB']:.1f} GB"])
    return grid(["pictures a second", "new tokens", "the captioner", "memory"], rows)


def captions_beside_vllm() -> str:
    """Write the table of docs/captioning.md: captions a second, and the hours of a million pictures.

    Raises:
        ValueError: if the file mixes measurements of two commits
    """
    document = load(FILE)
    rows = []
    for (model, job, tokens), sides in jobs(document).items():
        if job == CAPTIONING:
            vllm, ours, ratio = both_sides(sides)
            hours = 1e6 / 3600 / sides["ours"]["pictures/s"]
            memory = f"{sides['ours']['GB']:.1f} GB"
            rows.append([title(model), str(tokens), vllm, f"{ours} ({ratio})", f"{hours:.1f} h", memory])
    head = ["pictures a second", "new tokens", name(document), "the captioner", "a million pictures", "memory"]
    return f"{grid(head, rows)}\n*{measured_at(document, FILE)}*\n"
