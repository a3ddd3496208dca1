"""Merges never replace a complete file by few lines: they ask for the name of a run or of a prompt. Their formats."""

import json
from collections import Counter
from pathlib import Path

import pytest
from captioner.exports import Export
from captioner.journal import Journal, Record
from programs import draw, encode, lines, words
from support_captioning import PROMPT, call, caption, put, write_parquet

pytestmark = pytest.mark.usefixtures("quick")

TRIED = "what is it ?"


def prompts_in(result: Path) -> list[str]:
    return [line["prompt"] for line in lines(result)]


@pytest.fixture
def result(photos: Path, output: Path, tmp_path: Path) -> Path:
    """Merge three captions, and try another prompt on one picture afterwards."""
    caption(photos, output)
    assert call("merge", output, tmp_path / "out.jsonl").exit_code == 0
    caption(photos, output, "--limit=1", prompt=TRIED)
    return tmp_path / "out.jsonl"


def test_newest_prompts_of_fewer_pictures_are_merged_only_by_name(output: Path, result: Path) -> None:
    run = Journal(output).newest()["run"]
    refusal = call("merge", output, result)
    assert refusal.exit_code == 2 and prompts_in(result) == [PROMPT] * 3
    printed = words(refusal)
    assert f"the newest captions (run {run}) are 1 records, and others are of more pictures" in printed
    assert f"--run {run} --prompt '{TRIED}', or --run {run} --prompt '{PROMPT}' (2 more)" in printed
    for options, counts in (
        ([f"--prompt={PROMPT}"], {PROMPT: 3}),
        ([f"--prompt={TRIED}"], {TRIED: 1}),
        ([f"--prompt={PROMPT}", f"--prompt={TRIED}"], {PROMPT: 3, TRIED: 1}),
        ([f"--run={run}"], {TRIED: 1}),
    ):
        assert call("merge", output, result, *options).exit_code == 0, options
        assert Counter(prompts_in(result)) == counts, options


def test_errors_of_another_prompt_make_no_prompt_partial(photos: Path, output: Path, tmp_path: Path) -> None:
    (photos / "cut.png").write_bytes(b"no picture")
    caption(photos, output)
    (photos / "cut.png").unlink()
    caption(photos, output, prompt=TRIED)
    assert call("merge", output, tmp_path / "out.jsonl").exit_code == 0


def test_prompts_stand_in_the_order_that_merge_names(photos: Path, output: Path) -> None:
    caption(photos, output, f"--prompt={TRIED}")
    by_prompt = {(record.key, record.prompt): record.caption for record in Journal(output).records()}
    for prompts in ((PROMPT, TRIED), (TRIED, PROMPT)):
        done = call("merge", output, photos, *(f"--prompt={prompt}" for prompt in prompts))
        assert done.exit_code == 0, words(done)
        assert (photos / "a.txt").read_text().splitlines() == [by_prompt["a.png", prompt] for prompt in prompts]


def test_a_prompt_without_records_is_refused(output: Path, result: Path) -> None:
    mistyped = call("merge", output, result, "--prompt=describe it")
    assert mistyped.exit_code == 2 and prompts_in(result) == [PROMPT] * 3
    assert "no records of the prompt 'describe it'" in words(mistyped)
    assert f"'{PROMPT}'" in words(mistyped) and f"'{TRIED}'" in words(mistyped)


def test_missing_records_are_counted_by_prompt(photos: Path, output: Path, tmp_path: Path) -> None:
    """Surplus records of one prompt hide no missing ones of another."""
    both = [f"--prompt={PROMPT}", f"--prompt={TRIED}"]
    caption(photos, output, *both, "--limit=2")
    for shard in Journal(output).shards():
        all_lines = shard.read_text().splitlines(keepends=True)
        shard.write_text("".join(line for line in all_lines if TRIED not in line or "a.png" in line))
    caption(photos, output, prompt=PROMPT)
    merged = call("merge", output, tmp_path / "out.jsonl", f"--prompt={TRIED}")
    assert merged.exit_code == 1 and "1 records are missing" in words(merged)
    assert call("merge", output, tmp_path / "out.jsonl", f"--prompt={PROMPT}").exit_code == 0


def test_a_prompt_of_another_run_is_merged_with_its_run(photos: Path, output: Path, result: Path) -> None:
    first = Journal(output).newest()["run"]
    caption(photos / "a.png", output, "--attempt=2", prompt=PROMPT)
    second = Journal(output).newest()["run"]
    assert f"--run {first} --prompt '{PROMPT}' (2 more)" in words(call("merge", output, result))
    absent = call("merge", output, result, f"--prompt={TRIED}")
    assert absent.exit_code == 2 and f"run {second} has no records of the prompt '{TRIED}'" in words(absent)
    for run, count in ((first, 3), (second, 1)):
        assert call("merge", output, result, f"--prompt={PROMPT}", f"--run={run}").exit_code == 0
        assert len(lines(result)) == count


# --- formats, read back as the programs that load them do -------------------------------------------------------------


def test_metadata_for_imagefolder(output: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    put(photos, "a.png", "sub/b.c.png")
    (photos / "bad.png").write_bytes(b"no picture")
    caption(photos, output, "--prompt=describe this video .")
    done = call("merge", output, photos / "metadata.jsonl")
    assert done.exit_code == 0 and "wrote lines for 2 pictures of run" in words(done)
    rows = lines(photos / "metadata.jsonl")
    assert [line["file_name"] for line in rows] == ["a.png", "sub/b.c.png"]
    assert all(line.keys() == {"file_name", "text", "text_2"} for line in rows)
    assert all((photos / line["file_name"]).is_file() and line["text"] for line in rows)
    done = call("merge", output, tmp_path / "else" / "metadata.jsonl")
    assert done.exit_code == 1 and not (tmp_path / "else").exists() and "2 pictures are not in" in words(done)


def test_records_name_the_rows_of_a_table(output: Path, tmp_path: Path) -> None:
    """So they can be joined."""
    put(tmp_path / "data", "x.png")
    (tmp_path / "data" / "part").mkdir()
    pictures = [encode(draw(seed)[0]) for seed in range(3)]
    table = write_parquet(tmp_path / "data" / "part" / "t.parquet", {"image": pictures})
    caption([tmp_path / "data", table], output)
    assert call("merge", output, tmp_path / "out.jsonl").exit_code == 0
    rows = lines(tmp_path / "out.jsonl")
    assert [(row["source"], row["row"]) for row in rows] == [*(("part/t.parquet", n) for n in range(3)), (None, None)]
    assert {row["asked"] for row in rows} == {"describe this picture ."}


def test_texts_of_videos_and_several_lines(tmp_path: Path) -> None:
    """Captions keep their line ends. Files are valid UTF-8, whatever names they hold."""
    name = b"n\xff.png".decode(errors="surrogateescape")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / name).touch()
    record = Record(key=name, prompt="p", status="ok", caption="two\nlines é \udcff", bytes=0)
    done = Export(tmp_path, {"root": str(tmp_path / "p"), "prompts": ["p"]})
    done([record], tmp_path / "p")
    (written,) = (tmp_path / "p").glob("*.txt")
    assert written.read_bytes() == "two\nlines é \\udcff\n".encode() and done.written == 1
    done([record], tmp_path / "p" / "metadata.jsonl")
    with open(tmp_path / "p" / "metadata.jsonl", encoding="utf-8") as file:
        assert json.loads(file.read())["file_name"] == name
