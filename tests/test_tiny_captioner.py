"""The scenes that the tiny captioners learn, and the inputs that they are trained on."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "tiny_captioner")]

import batch_caption  # noqa: E402
import scenes  # noqa: E402
import train  # noqa: E402


def test_a_seed_decides_a_scene() -> None:
    for seed in range(20):
        one, other = scenes.scene(seed), scenes.scene(seed)
        assert one == other
        for first, second in zip(scenes.draw(one, 140, 112), scenes.draw(other, 140, 112), strict=True):
            assert first.size == (140, 112) and first.tobytes() == second.tobytes()


def test_captions_are_many_and_of_known_words() -> None:
    captions = {scenes.scene(seed).caption for seed in range(20000)}
    assert len(captions) > 13000
    assert {word for caption in captions for word in caption.split()} <= set(scenes.WORDS)
    things = len(scenes.SIZES) * len(scenes.COLOURS) * len(scenes.SHAPES)
    assert things**2 * len(scenes.RELATIONS) * (1 + len(scenes.CHARACTERS) ** 2) > 8_000_000


def test_other_captions_are_other_pictures() -> None:
    """Every word of a caption is to be seen: scenes that differ in one differ in their pixels."""
    drawn = {}
    for seed in range(400):
        scene = scenes.scene(seed, video=False)
        pixels = np.asarray(scenes.draw(scene, 112, 112)[0])
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) >= 2
        drawn.setdefault(pixels.tobytes(), set()).add(scene.caption)
    assert all(len(captions) == 1 for captions in drawn.values())


def test_things_stand_where_captions_say() -> None:
    for seed in range(300):
        scene = scenes.scene(seed, video=False)
        first, second = scene.things
        relation = next(relation for relation in scenes.RELATIONS if f" is {relation} " in scene.caption)
        across, down = second.x - first.x, second.y - first.y
        margin = across - abs(down) if relation == "left of" else down - abs(across)
        assert margin > 0.04, scene  # no picture could as well have the other relation


def test_videos_move() -> None:
    for seed in range(40):
        scene = scenes.scene(seed, video=True)
        frames = [np.asarray(frame).astype(int) for frame in scenes.draw(scene, 112, 112)]
        assert len(frames) == scenes.FRAMES and scene.caption.split()[-2] == "moves"
        centres = []
        for frame in frames:
            there = np.argwhere(np.abs(frame - frame[0, 0]).sum(-1) > 40)
            centres.append(there.mean(0)[::-1])
        moved = centres[-1] - centres[0]
        assert (
            tuple(np.sign(np.where(np.abs(moved) > 10, moved, 0)).astype(int))
            == scenes.MOTIONS[scene.caption.split()[-1]]
        )


@pytest.mark.parametrize("family", train.FAMILIES)
def test_training_inputs_are_the_processors(family: str, tmp_path: Path) -> None:
    """What the model is trained on is what its saved processor makes of the same pictures."""
    tokenizer = train.build_tokenizer()
    model = train.build_model(family, tokenizer, 0).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    head = model.model.visual.blocks[0].attn.head_dim
    assert head == {"qwen3_vl": 72}.get(family, 80)
    train.save(model, tokenizer, family, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size <= 8 << 20
    model.float()
    unit = 2 * train.FAMILIES[family][1]["patch_size"]
    seeds = [train.HELD_OUT + index for index in range(3)]
    batch = train.draw_batch(seeds, unit, random.Random(0), video=False)
    ours = train.encode(batch, family, tokenizer, torch.device("cpu"), answer=False)
    pictures = [scenes.draw(scenes.scene(seed, video=False), *batch["pixels"].shape[3:1:-1])[0] for seed in seeds]
    processor = batch_caption.load_processor(str(tmp_path))
    captioner = batch_caption.Captioner(model, processor, prompt="describe this picture .")
    theirs = captioner.encode(pictures)
    for name in ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids"):
        assert torch.equal(ours[name], theirs[name]), name
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], rtol=0, atol=1e-5)
    labelled = train.encode(batch, family, tokenizer, torch.device("cpu"), answer=True)
    for row, caption in enumerate(batch["captions"]):
        answer = labelled["labels"][row][labelled["labels"][row] >= 0]
        assert tokenizer.decode(answer, skip_special_tokens=True).split() == caption.split()
        assert answer[-1] == tokenizer.eos_token_id
    assert torch.isfinite(model(**labelled).loss)
    clip = train.encode(
        train.draw_batch(seeds, unit, random.Random(0), video=True), family, tokenizer, torch.device("cpu"), answer=True
    )
    assert torch.isfinite(model(**clip).loss) and clip["video_grid_thw"][0, 0] == scenes.FRAMES // 2
