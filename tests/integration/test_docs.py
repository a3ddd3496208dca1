"""README and docs: Python runs, commands exist, links lead somewhere, the site builds."""

import copy
import doctest
import functools
import inspect
import io
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from captioner.processors import load_processor
from PIL import Image
from support.libraries import start_process_group
from support.versions import ENCODES_AGAIN

import hf_vit_accel
from hf_vit_accel.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
START = ROOT / "docs" / "index.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
WRITTEN = [
    README,
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "RELEASING.md",
    *sorted((ROOT / "examples").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
FENCE = re.compile(
    r"(?:<!-- (?:run|recipe): (?P<needs>[\w.]+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PARAMETERS = inspect.signature(hf_vit_accel.patch).parameters


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True, kw_only=True)
class Block:
    needs: str  # "" for nothing, "gpu", the parameter of `patch` that it shows, or a recipe, which its framework runs
    language: str
    code: str


def blocks(path: Path, *languages: str) -> list[Block]:
    fences = FENCE.finditer(path.read_text())
    all_blocks = [Block(needs=fence["needs"] or "", language=fence["language"], code=fence["code"]) for fence in fences]
    return [block for block in all_blocks if block.language in languages]


read_processor = functools.cache(load_processor)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Load tiny checkpoints in place of those that the pages name; put a picture into the working folder."""
    folder = ROOT / "tests" / "tiny_captioner"
    folders = {"Qwen/Qwen3-VL-8B-Instruct": folder / "qwen3_vl", "Qwen/Qwen2.5-VL-7B-Instruct": folder / "qwen2_5_vl"}
    processors = {name: read_processor(str(path)) for name, path in folders.items()}
    load: Callable[..., Any] = transformers.AutoModelForImageTextToText.from_pretrained

    def load_tiny(name: str, **options: object) -> object:
        if not torch.cuda.is_available():
            options["dtype"] = torch.float32  # the checkpoints have bfloat16, whose products are slow on a CPU
        return load(folders[name], **options)

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", load_tiny)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name: copy.deepcopy(processors[name]))
    monkeypatch.chdir(tmp_path)
    Image.linear_gradient("L").convert("RGB").save("photo.jpg")


@pytest.fixture
def group() -> Iterator[None]:
    with ExitStack() as stack:
        start_process_group(stack)
        yield


def run(path: Path, code_blocks: list[Block], names: dict[str, Any]) -> dict[str, Any]:
    for block in code_blocks:
        exec(compile(block.code, name(path), "exec"), names)
    return names


def started() -> dict[str, Any]:
    """Run Getting started; return the names that all pages assume, such as the model and the picture."""
    names = run(START, blocks(START, "python")[:2], {"torch": torch})
    assert {"model", "processor", "inputs", "tokens"} <= names.keys()
    photo = Image.open("photo.jpg")
    return names | {"images": [photo, photo.resize((photo.width // 2, photo.height))]}


def test_the_readme_is_short_and_shows_the_change_early() -> None:
    lines = README.read_text().splitlines()
    words = [word for word in README.read_text().split() if re.search(r"\w", word)]
    assert len(lines) <= 95 and 400 <= len(words) <= 600
    assert "+ model = hf_vit_accel.patch(model)" in lines[:20]
    assert len(blocks(README, "diff")) == 1 and not blocks(README, "python")


@pytest.mark.parametrize("path", [*WRITTEN, ROOT / "SUPPORT.md"], ids=name)
def test_files_that_pages_name_exist(path: Path) -> None:
    files = re.findall(
        r"`((?:tests|benchmarks|examples|docs|hf_vit_accel)/[\w./-]+\.(?:py|md|json))`", path.read_text()
    )
    assert not [file for file in files if "NAME" not in file and not (ROOT / file).exists()]


JOBS = ("captioning", "embedding", "training", "generate")
NO_SENTENCE = re.compile(r"```.*?```|<!--.*?-->|^\|.*?$", re.DOTALL | re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*(?:[-*#]|\d\.)")


def test_the_docs_are_few_and_every_job_has_a_short_page() -> None:
    assert len(PAGES) <= 25
    assert not [job for job in JOBS if len((ROOT / "docs" / f"{job}.md").read_text().splitlines()) > 120]


@pytest.mark.parametrize("path", [README, *PAGES], ids=name)
def test_no_sentence_has_more_than_24_words(path: Path) -> None:
    text = re.sub(r"`[^`]*`", "code", NO_SENTENCE.sub("\n\n", path.read_text()))
    sentences = END_OF_SENTENCE.split(text)
    assert not [" ".join(sentence.split()) for sentence in sentences if len(sentence.split()) > 24]


def test_the_readme_s_diff_runs_as_it_stands(hub: None) -> None:
    """Its old side is stock, its new side runs fast and gives the same tokens."""
    (diff,) = blocks(README, "diff")
    lines = diff.code.splitlines()
    assert all(line[:2] in ("+ ", "- ", "  ") for line in lines)
    old, new = ("\n".join(line[2:] for line in lines if line[0] in side) for side in (" -", " +"))
    stock = started() | {"AutoModelForImageTextToText": transformers.AutoModelForImageTextToText}
    hf_vit_accel.unpatch(stock["model"])
    exec(old, stock)
    ours = {key: value for key, value in stock.items() if key != "hf_vit_accel"}
    exec(new, ours)
    assert ours["model"] is not stock["model"] and torch.equal(ours["tokens"], stock["tokens"])
    status = str(hf_vit_accel.status(ours["model"]))
    assert f"{1 + ENCODES_AGAIN} fast, 0 stock" in status and "decoding: 1 call on a static cache" in status
    assert "patched" not in str(hf_vit_accel.status(stock["model"])).splitlines()[0]


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name)
def test_python_of_the_docs_runs(path: Path, hub: None, group: None) -> None:
    code_blocks = blocks(path, "python")
    for block in code_blocks:
        compile(block.code, name(path), "exec")
        is_recipe = block.needs.endswith(".py")
        assert is_recipe or block.needs in ("", "gpu") or re.search(rf"\b{block.needs}=", block.code)
    runnable = [block for block in code_blocks if not block.needs or block.needs in PARAMETERS]
    run(path, runnable, started() if runnable else {})


@pytest.mark.gpu
@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name)
def test_python_of_the_docs_runs_on_a_gpu(path: Path, hub: None, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # device_map="auto" would split so small a model
    names = started() | {"images": [Image.open("photo.jpg").resize((320, 320))] * 2}
    assert names["model"].device.type == "cuda"
    try:
        run(path, [block for block in blocks(path, "python") if block.needs in ("", "gpu", *PARAMETERS)], names)
    except hf_vit_accel.BackendUnavailableError as error:
        pytest.skip(str(error))


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    command = typer.main.get_command(app)
    seen = set()
    for path in WRITTEN:
        text = "".join(block.code for block in blocks(path, "sh", "bash")).replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            program = words[0] if words else ""
            seen.add(program)
            if program == "make":
                assert words[1] in targets, f"{name(path)}: {line}"
            elif program == "hf-vit-accel":
                subcommand = command.commands[words[1]]
                subcommand.make_context(words[1], words[2:])  # raises for an unknown option
            elif program in ("python", "accelerate"):
                files = [
                    word
                    for word in words
                    if word.startswith(("examples/", "benchmarks/", "docs/")) and word.endswith(".py")
                ]
                assert all((ROOT / file).is_file() for file in files), f"{name(path)}: {line}"
    assert {"make", "hf-vit-accel", "python", "accelerate"} <= seen


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.parent != ROOT / "docs"], ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    """The build of the site checks the links of docs/."""
    for target in re.findall(r"\]\((?![a-z]+:)([^)]+)\)", path.read_text()):
        workflow = re.fullmatch(r"\.\./\.\./actions/(workflows/\w+\.yml)(/badge\.svg)?", target)
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if workflow is not None:
            there = ROOT / ".github" / workflow[1]
        assert there.exists(), f"{target} in {name(path)}"
        heads = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w\s-]", "", head.replace("`", "")).strip().lower().replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, f"{target} in {name(path)}"


DOCUMENTED = ["", *(name for name in hf_vit_accel.__all__ if ">>>" in (getattr(hf_vit_accel, name).__doc__ or ""))]
"""The public names whose docstrings hold examples; "" is the package."""


@pytest.mark.parametrize("public", DOCUMENTED)
def test_examples_in_docstrings_run(public: str, hub: None) -> None:
    documented = getattr(hf_vit_accel, public) if public else hf_vit_accel
    names = started()
    hf_vit_accel.unpatch(names["model"])
    (example,) = doctest.DocTestFinder(recurse=False).find(
        documented, public or "hf_vit_accel", globs=names | {"hf_vit_accel": hf_vit_accel}
    )
    assert example.examples, f"no example in the docstring of {public or 'the package'}"
    printed = io.StringIO()
    results = doctest.DocTestRunner().run(example, out=printed.write)
    assert results.failed == 0, printed.getvalue()


LLMS = ROOT / "llms.txt"


def test_llms_txt_names_every_page_once_by_its_title() -> None:
    links = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)", LLMS.read_text(), re.MULTILINE)
    included = {"SUPPORT.md": "support.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
    assert sorted(Path(target).name for _, target in links) == sorted(
        [page.name for page in PAGES if page.name not in included.values()] + list(included)
    )
    for title, target in links:
        assert (ROOT / target).read_text().startswith(f"# {title}\n"), target


def test_the_call_on_one_page_shows_lines_of_the_source() -> None:
    """Each file's lines are shown in their order, without its comments. Where some are left out, there is `...`."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    (screen,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    files = re.findall(r"^# (\S+\.py).*\n((?:(?!# ).*\n)+)", screen, re.MULTILINE)
    assert len(files) == 6
    for file, part in files:
        source = (ROOT / "hf_vit_accel" / file).read_text().splitlines()
        following = 0
        is_gap = True
        for line in filter(None, part.splitlines()):
            code = line.split("  # ")[0]
            if code.strip() != "...":
                at = source.index(code, following)
                assert is_gap or at == following, f"{file}: `...` is missing before {code}"
                following = at + 1
            is_gap = code.strip() == "..."
