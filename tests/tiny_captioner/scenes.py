"""Draw synthetic scenes with exact captions: shapes and their relation, characters to read, short videos of motion.

The seed alone decides a scene, which can be drawn at any size. The same seed gives the same caption and, at the same
size, the same picture. There are over four million captions.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sin

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 180),
    "orange": (245, 140, 30),
    "black": (25, 25, 25),
    "pink": (245, 130, 190),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES = {"small": 0.11, "large": 0.2}
"""Radius, as a share of the picture's shorter side."""
RELATIONS = ("left of", "above")
"""A caption begins with the left or the upper thing, so every picture has exactly one caption."""
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
CHARACTERS = "023456789ACEFHKLMNPRTUX"
GRAMMAR = ("a", "is", "of", "above", "moves", "and", "the", "text")
WORDS = tuple(dict.fromkeys((*COLOURS, *SHAPES, *SIZES, *MOTIONS, *CHARACTERS, *GRAMMAR)))
"""Every word of every caption."""
BACKGROUNDS = {"light": (238, 238, 232), "dark": (96, 100, 108)}
FRAMES = 4


@dataclass(frozen=True)
class Thing:
    """A shape at a place."""

    size: str
    colour: str
    shape: str
    x: float  # of the centre, as a share of the picture's width
    y: float

    @property
    def words(self) -> str:
        """The words of the thing in a caption."""
        return f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """The content of a picture or a video."""

    things: tuple[Thing, ...]
    background: str
    caption: str
    seed: int
    motion: tuple[int, int] | None = None  # of the first thing in a video
    text: str = ""  # in the picture's lower part

    @property
    def frames(self) -> int:
        """The number of pictures: 1, or the frames of a video."""
        return 1 if self.motion is None else FRAMES


def scene(seed: int, *, video: bool) -> Scene:
    """Decide a scene."""
    chance = random.Random(seed)
    chance.random()  # decided in the training whether it is a video
    background = chance.choice(list(BACKGROUNDS))

    def thing(x: float, y: float) -> Thing:
        colours = list(COLOURS)
        return Thing(chance.choice(list(SIZES)), chance.choice(colours), chance.choice(SHAPES), x, y)

    if video:
        name, (dx, dy) = chance.choice(list(MOTIONS.items()))
        start = thing(0.5 - 0.25 * dx + chance.uniform(-0.05, 0.05), 0.5 - 0.25 * dy + chance.uniform(-0.05, 0.05))
        return Scene((start,), background, f"{start.words} moves {name}", seed, motion=(dx, dy))
    relation = chance.choice(RELATIONS)
    text = "".join(chance.choices(CHARACTERS, k=2)) if chance.random() < 0.5 else ""
    bottom = 0.62 if text else 1.0  # text fills the lower part of the picture
    near = chance.uniform(0.2, 0.3)
    far = chance.uniform(0.7, 0.8)
    across = [chance.uniform(0.4, 0.6) for _ in range(2)]
    if relation == "left of":
        things = (thing(near, across[0] * bottom), thing(far, across[1] * bottom))
    else:
        things = (thing(across[0], near * bottom), thing(across[1], far * bottom))
    caption = f"{things[0].words} is {relation} {things[1].words}"
    if text:
        caption += f" and the text {' '.join(text)}"
    return Scene(things, background, caption, seed, text=text)


_font = lru_cache(maxsize=1024)(ImageFont.load_default)


def draw(scene: Scene, width: int, height: int) -> list[Image.Image]:
    """Draw the scene in RGB; return one picture, or the frames of a video."""
    chance = random.Random(scene.seed + 1)
    shade = chance.randint(-12, 12)
    background = tuple(channel + shade for channel in BACKGROUNDS[scene.background])
    pictures = []
    for frame in range(scene.frames):
        picture = Image.new("RGB", (width, height), background)
        pen = ImageDraw.Draw(picture)
        for index, thing in enumerate(scene.things):
            x = thing.x
            y = thing.y
            if scene.motion is not None and index == 0:
                distance = 0.5 * frame / (FRAMES - 1)
                x += distance * scene.motion[0]
                y += distance * scene.motion[1]
            room = 0.7 if scene.text else 1.0  # things get smaller where text takes their space
            radius = SIZES[thing.size] * min(width, height) * room
            _OUTLINES[thing.shape](pen, x * width, y * height, radius, COLOURS[thing.colour])
        if scene.text:
            size = 0.34 * min(width, height)
            centre = (chance.uniform(0.3, 0.7) * width, 0.81 * height)
            ink = (250, 250, 250) if scene.background == "dark" else (10, 10, 10)
            pen.text(centre, " ".join(scene.text), font=_font(size), fill=ink, anchor="mm")
        pictures.append(picture)
    return pictures


Outline = Callable[[ImageDraw.ImageDraw, float, float, float, tuple[int, int, int]], None]


def _circle(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _square(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
    half = 0.88 * radius
    pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)


def _polygon(radii: tuple[float, ...]) -> Outline:
    """Return a function that draws a polygon: its corners have these shares of the radius, clockwise from the top."""

    def outline(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
        angles = [2 * pi * index / len(radii) for index in range(len(radii))]
        corners = [
            (x + radius * share * sin(angle), y - radius * share * cos(angle))
            for share, angle in zip(radii, angles, strict=True)
        ]
        pen.polygon(corners, fill=colour)

    return outline


_OUTLINES: dict[str, Outline] = {
    "circle": _circle,
    "square": _square,
    "triangle": _polygon((1.15, 1.15, 1.15)),
    "star": _polygon((1.2, 0.45) * 5),
}
