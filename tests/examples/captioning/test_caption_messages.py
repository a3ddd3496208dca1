"""Messages and options: items that are passed over, runs that stop, settings that differ, disks that are full."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from programs import CAPTIONERS, words
from support_captioning import MODEL, batch_caption, caption, captions_in, load_once, merged, put
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

import hf_vit_accel

pytestmark = pytest.mark.usefixtures("quick")


# --- the model is named -------------------------------------------------------------------------------------------


def test_a_revision_of_the_hub_is_another_run(photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = []

    def config(name: str, revision: str | None = None) -> PretrainedConfig:
        loaded = AutoConfig.from_pretrained(MODEL)
        loaded._commit_hash = {"v1": "1111aaaa", None: "2222bbbb"}[revision]
        return loaded

    def load(name: str, *arguments: object) -> object:
        commits.append(arguments[-1])
        return load_once(str(MODEL), *arguments[:-1])

    monkeypatch.setattr("captioner.checkpoints.AutoConfig", SimpleNamespace(from_pretrained=config))
    processor = batch_caption.load_processor
    monkeypatch.setattr(batch_caption, "load_processor", lambda name, revision: processor(str(MODEL)))
    monkeypatch.setattr(batch_caption, "load_model", load)
    assert "org/name (revision 2222bbbb)" in words(caption(photos, output, model="org/name"))
    assert "0 of them to caption" in words(caption(photos, output, model="org/name"))
    printed = words(caption(photos, output, "--revision=v1", model="org/name"))
    assert "3 of them to caption" in printed and "a new run: revision changed" in printed
    assert commits == ["2222bbbb", "1111aaaa"]  # a commit, since a branch may move between the loads of two processes


# --- nothing is passed over in silence ---------------------------------------------------------------------------


def test_files_that_are_passed_over_are_reported(photos: Path, output: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "c.png", "deep/d.png")
    (photos / "part0").symlink_to(tmp_path / "elsewhere")
    (photos / "loop").symlink_to(photos)
    (photos / "linked.png").symlink_to(tmp_path / "elsewhere" / "c.png")
    (photos / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    shutil.copy(photos / "a.png", photos / "IMG_0001")
    (photos / "._a.png").write_bytes(b"\0\5\x16\7")
    (photos / "shard.tar").touch()
    (photos / "notes.md").touch()
    (photos / "IMG_0002.CR2").touch()
    done = caption(photos, output)
    printed = words(done)
    assert done.exit_code == 0 and captions_in(output).keys() == {"a.png", "b.png", "0/c.png", "linked.png"}
    assert "2 linked folders (name them to search them)" in printed and "part0" in printed
    assert "1 links to nowhere" in printed and "gone.jpg" in printed
    assert "1 files without a suffix" in printed and "IMG_0001" in printed
    assert "1 macOS's notes on files" in printed and "1 shards" in printed and "notes.md" not in printed
    assert "1 .cr2 files" in printed and "IMG_0002.CR2" in printed
    named = words(caption([photos, photos / "part0"], output, f"--root={photos}"))
    assert "6 items, 2 of them to caption" in named


def test_folders_that_cannot_be_listed_are_reported(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(photos / "closed", "c.png")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    printed = words(caption(photos, output))
    assert "3 items" in printed and "1 unreadable folders (Permission denied)" in printed and "closed" in printed


# --- a run is known by the checkpoint's content ------------------------------------------------------------------


def test_a_touched_or_moved_model_is_the_same_and_another_is_not(photos: Path, output: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    caption(photos, output, model=model)
    os.utime(model / "config.json", (0, 0))
    for name in ("notes.md", "trainer_state.json"):
        (model / name).write_text("{}")
    assert "0 of them to caption" in words(caption(photos, output, model=model))
    model = model.rename(tmp_path / "moved")
    assert "0 of them to caption" in words(caption(photos, output, model=model))
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"repetition_penalty": 1.5}))
    printed = words(caption(photos, output, model=model))
    assert "3 of them to caption" in printed and "a new run: files changed" in printed
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    printed = words(caption(photos, output, "--dry-run", model=model))
    assert "3 of them to caption" in printed


# --- what ends, and how ----------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Make folders of models that cannot caption."""
    folder = tmp_path / "models"
    LlamaConfig().save_pretrained(folder / "llama")
    for name, file, text in (("adapters", "adapter_config.json", "{}"), ("none", "notes.txt", "no model")):
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
    shutil.copytree(CAPTIONERS / "qwen2_5_vl", folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("no-such/model", "no folder is there"),
        ("{photos}", "holds no checkpoint"),
        (f"{MODEL}/config.json", "is a file; name the folder"),
        ("{models}/llama", "(llama) is not a vision-language model"),
        ("{models}/none", "holds no checkpoint"),
        ("{models}/adapters", "adapters holds LoRA adapters: merge them into their model first"),
        ("{models}/base", "its files hold no chat template"),
    ],
)
def test_a_model_that_cannot_caption_is_refused_in_one_sentence(
    photos: Path, output: Path, models: Path, monkeypatch: pytest.MonkeyPatch, model: str, why: str
) -> None:
    """Most of them before inputs are listed, which may take long."""
    if "chat template" not in why:
        monkeypatch.setattr("captioner.prepare.find", lambda *_, **__: pytest.fail("listed"))
    done = caption(photos, output, model=model.format(photos=photos, models=models))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit) and "Traceback" not in words(done)
    assert why in words(done) and not list(output.glob("captions-*")), words(done)


# --- before anything is captioned -----------------------------------------------------------------------------------


def test_a_field_that_no_picture_has_is_refused_before_a_model_is_loaded(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_caption, "load_model", lambda *_: pytest.fail("loaded"))
    done = caption(photos, output, prompt="{kind} {foo}")
    assert done.exit_code == 2 and not list(output.glob("captions-*"))
    assert "no picture can fill a prompt: the prompt names {foo}; there are folder, key, kind, name" in words(done)


def test_a_misspelt_field_is_refused_with_the_fields_that_some_pictures_have(photos: Path, output: Path) -> None:
    (photos / "a.json").write_text('{"title": "a star"}')
    done = caption(photos, output, prompt="describe {titel} .")
    assert "names {titel}; there are folder, key, kind, name, stem, title" in words(done)


def test_a_field_that_one_picture_has_is_asked(photos: Path, output: Path) -> None:
    (photos / "b.json").write_text('{"title": "a star"}')
    done = caption(photos, output, prompt="describe {title} .")
    assert "error, 2 x UnknownField: the prompt names {title}" in words(done)
    assert captions_in(output).keys() == {"b.png"}
    (photos / "b.json").unlink()
    put(photos, "c.png")
    done = caption(photos, output, prompt="describe {title} .")  # captions of this prompt are there already
    assert done.exit_code == 1 and captions_in(output).keys() == {"b.png"}
    (photos / "b.json").write_text('{"title": ')  # metadata that cannot be read are not called unknown
    another = output.with_name("another")
    assert caption(photos, another, prompt="describe {title} .").exit_code == 1 and len(merged(another)) == 4


def test_a_model_that_cannot_be_patched_is_refused_in_one_sentence(
    photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_vit_accel, "patch", Mock(side_effect=ValueError("No vision tower found.\nFamilies: ...")))
    done = caption(photos, output)
    assert done.exit_code == 2 and f"cannot load {MODEL}: No vision tower found." in words(done)
    assert not list(output.glob("captions-*"))
    assert caption(photos, output, "--no-patch").exit_code == 0
