"""Twenty pictures as a person would draw them with Pillow, with questions of the advertised kinds and the right answers.

They share no code with the world that the demo checkpoint was trained on: they show whether it answers about other people's
drawings. Each function draws one picture; what is asked about it stands above it: task, question, answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from PIL import Image, ImageDraw


class Asked(NamedTuple):
    """A question, and the names of the drawings that come before it."""

    drawings: tuple[str, ...]
    task: str
    text: str
    answer: str


Draw = Callable[[], Image.Image]
DRAWINGS: dict[str, Draw] = {}
QUESTIONS: list[Asked] = []


def drawing(*asked: tuple[str, str, str]) -> Callable[[Draw], Draw]:
    """Adds a drawing and the questions about it."""

    def add(draw: Draw) -> Draw:
        DRAWINGS[draw.__name__] = draw
        QUESTIONS.extend(Asked((draw.__name__,), *question) for question in asked)
        return draw

    return add


@drawing(
    ("color_of", "What color is the circle?", "red"),
    ("yesno", "Is there a red square?", "no"),
    ("where", "Where is the circle?", "center"),
    ("list", "Describe the picture.", "a red circle"),
)
def red_circle() -> Image.Image:
    image = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((62, 62, 162, 162), fill="red")
    return image


@drawing(
    ("list", "What is in the picture?", "a blue square and an orange triangle"),
    ("shape_of", "What shape is orange?", "triangle"),
    ("count", "How many shapes are there?", "2"),
)
def square_beside_triangle() -> Image.Image:
    image = Image.new("RGB", (200, 150), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((20, 45, 80, 105), outline="blue", width=3)
    draw.polygon([(150, 40), (185, 108), (115, 108)], fill="orange")
    return image


@drawing(
    ("where", "Where is the square?", "top left"),
    ("color_of", "What colour is the circle?", "yellow"),
    ("list", "Describe the picture.", "a blue square and a yellow circle"),
)
def navy_and_gold() -> Image.Image:
    image = Image.new("RGB", (448, 448), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((40, 40, 190, 190), fill="navy")
    draw.ellipse((260, 260, 410, 410), fill="gold")
    return image


@drawing(
    ("shape_of", "What shape is black?", "cross"),
    ("where", "Where is the cross?", "center"),
    ("count", "How many shapes are there?", "1"),
)
def small_black_cross() -> Image.Image:
    image = Image.new("RGB", (112, 112), "white")
    draw = ImageDraw.Draw(image)
    draw.line((56, 26, 56, 86), fill="black", width=6)
    draw.line((26, 56, 86, 56), fill="black", width=6)
    return image


@drawing(
    ("count_color", "How many red shapes are there?", "2"),
    ("where", "Where is the green circle?", "top right"),
    ("count", "How many shapes are there?", "3"),
    ("list", "Describe the picture.", "a red circle, a green circle and a red circle"),
)
def three_circles() -> Image.Image:
    image = Image.new("RGB", (320, 240), "white")
    draw = ImageDraw.Draw(image)
    for x, y, color in ((80, 60, "red"), (240, 60, "green"), (80, 180, "red")):
        draw.circle((x, y), 42, fill=color)
    return image


@drawing(
    ("color_of", "What color is the triangle?", "pink"),
    ("where", "Where is the pink triangle?", "bottom right"),
    ("yesno", "Is there a pink circle?", "no"),
)
def pink_outline() -> Image.Image:
    image = Image.new("RGB", (160, 160), "beige")
    ImageDraw.Draw(image).polygon([(115, 84), (146, 142), (84, 142)], outline="hotpink", width=4)
    return image


@drawing(
    ("list", "Describe the picture.", "a brown square and a gray circle"),
    ("color_of", "What color is the circle?", "gray"),
    ("yesno", "Is there a brown square?", "yes"),
)
def wide_strip() -> Image.Image:
    image = Image.new("RGB", (448, 140), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((60, 40, 120, 100), fill="brown")
    draw.ellipse((320, 35, 390, 105), fill="gray")
    return image


@drawing(
    ("list", "What is in the picture?", "a purple circle and a yellow square"),
    ("color_of", "What color is the square?", "yellow"),
    ("shape_of", "What shape is the purple one?", "circle"),
)
def tall_card() -> Image.Image:
    image = Image.new("RGB", (140, 300), "lavender")
    draw = ImageDraw.Draw(image)
    draw.ellipse((35, 40, 105, 110), fill="purple")
    draw.rectangle((40, 190, 100, 250), fill="yellow")
    return image


@drawing(
    ("shape_of", "What shape is blue?", "cross"),
    ("where", "Where is the blue cross?", "top left"),
    ("what_at", "What is in the top left?", "a blue cross"),
)
def blue_x() -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    draw = ImageDraw.Draw(image)
    draw.line((30, 30, 105, 105), fill="blue", width=14)
    draw.line((30, 105, 105, 30), fill="blue", width=14)
    return image


@drawing(
    ("list", "Describe the picture.", "a green triangle"),
    ("count", "How many shapes are there?", "1"),
    ("yesno", "Is there a green triangle?", "yes"),
)
def big_green_triangle() -> Image.Image:
    image = Image.new("RGB", (300, 300), "ivory")
    ImageDraw.Draw(image).polygon([(150, 40), (270, 250), (30, 250)], fill="green")
    return image


@drawing(
    ("list", "Describe the picture.", "a red circle, a blue square and a green triangle"),
    ("color_of", "What color is the triangle?", "green"),
    ("where", "Where is the square?", "top right"),
    ("count_color", "How many green shapes are there?", "1"),
)
def three_outlines() -> Image.Image:
    image = Image.new("RGB", (180, 180), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((15, 15, 75, 75), outline="red", width=2)
    draw.rectangle((108, 18, 165, 75), outline="blue", width=2)
    draw.polygon([(45, 105), (78, 165), (12, 165)], outline="green", width=2)
    return image


@drawing(
    ("count_color", "How many black shapes are there?", "2"),
    ("what_at", "What is in the top right?", "a black square"),
    ("shape_of", "What shape is the orange one?", "cross"),
    ("yesno", "Is there an orange cross?", "yes"),
)
def black_black_orange() -> Image.Image:
    image = Image.new("RGB", (400, 300), "#dddddd")
    draw = ImageDraw.Draw(image)
    draw.ellipse((50, 30, 150, 130), fill="black")
    draw.rectangle((255, 35, 345, 125), fill="black")
    draw.rectangle((90, 175, 110, 275), fill="orange")
    draw.rectangle((50, 215, 150, 235), fill="orange")
    return image


@drawing(
    ("color_of", "What colour is the square?", "gray"),
    ("shape_of", "What shape is grey?", "square"),
)
def gray_frame() -> Image.Image:
    image = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(image).rectangle((34, 34, 94, 94), outline="gray", width=4)
    return image


@drawing(
    ("count_color", "How many pink shapes are there?", "2"),
    ("list", "Describe the picture.", "a pink circle and a pink circle"),
    ("yesno", "Is there a pink square?", "no"),
)
def two_pink_circles() -> Image.Image:
    image = Image.new("RGB", (224, 168), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((20, 50, 90, 120), fill="pink")
    draw.ellipse((134, 50, 204, 120), fill="pink")
    return image


@drawing(
    ("list", "What is in the picture?", "an orange triangle and a blue circle"),
    ("where", "Where is the circle?", "bottom left"),
    ("what_at", "What is in the top right?", "an orange triangle"),
)
def sky() -> Image.Image:
    image = Image.new("RGB", (350, 350), "aliceblue")
    draw = ImageDraw.Draw(image)
    draw.polygon([(262, 40), (322, 140), (202, 140)], fill="darkorange")
    draw.ellipse((38, 208, 138, 308), fill="dodgerblue")
    return image


@drawing(
    ("shape_of", "What shape is brown?", "triangle"),
    ("color_of", "What color is the triangle?", "brown"),
    ("count_color", "How many red shapes are there?", "0"),
)
def brown_tent() -> Image.Image:
    image = Image.new("RGB", (120, 200), "lightyellow")
    ImageDraw.Draw(image).polygon([(60, 30), (100, 90), (20, 90)], fill="saddlebrown")
    return image


@drawing(
    ("count", "How many shapes are there?", "3"),
    ("color_of", "What color is the circle?", "blue"),
    ("where", "Where is the red square?", "top left"),
    ("yesno", "Is there a green square?", "no"),
)
def scattered() -> Image.Image:
    image = Image.new("RGB", (440, 300), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((30, 25, 95, 90), fill=(200, 0, 0))
    draw.ellipse((170, 140, 310, 280), fill=(60, 60, 200))
    draw.line((375, 40, 375, 120), fill="green", width=10)
    draw.line((335, 80, 415, 80), fill="green", width=10)
    return image


@drawing(
    ("list", "Describe the picture.", "a purple circle and a red cross"),
    ("where", "Where is the cross?", "bottom right"),
    ("shape_of", "What shape is purple?", "circle"),
)
def ring_and_thick_cross() -> Image.Image:
    image = Image.new("RGB", (196, 196), "whitesmoke")
    draw = ImageDraw.Draw(image)
    draw.ellipse((18, 18, 84, 84), outline="purple", width=5)
    draw.rectangle((130, 106, 158, 182), fill="crimson")
    draw.rectangle((106, 130, 182, 158), fill="crimson")
    return image


@drawing(
    ("yesno", "Is there a yellow circle?", "yes"),
    ("yesno", "Is there a yellow triangle?", "no"),
    ("where", "Where is the circle?", "top right"),
)
def sun() -> Image.Image:
    image = Image.new("RGB", (150, 150), "white")
    ImageDraw.Draw(image).ellipse((80, 15, 135, 70), fill="yellow")
    return image


@drawing(
    ("shape_of", "What shape is green?", "triangle"),
    ("color_of", "What color is the square?", "purple"),
    ("list", "Describe the picture.", "a green triangle and a purple square"),
)
def sail() -> Image.Image:
    image = Image.new("RGB", (280, 210), "mintcream")
    draw = ImageDraw.Draw(image)
    draw.polygon([(40, 70), (40, 150), (110, 150)], fill="limegreen")
    draw.rectangle((170, 75, 245, 150), fill="indigo")
    return image


QUESTIONS += (
    Asked(("red_circle", "blue_x"), "which", "Which picture has a blue cross?", "picture 2"),
    Asked(("red_circle", "blue_x"), "color_in", "What color is the circle in picture 1?", "red"),
    Asked(("navy_and_gold", "brown_tent"), "which", "Which picture has a triangle?", "picture 2"),
    Asked(("navy_and_gold", "brown_tent"), "list_in", "Describe picture 1.", "a blue square and a yellow circle"),
    Asked(("sun", "gray_frame", "sky"), "pictures", "How many pictures are there?", "3"),
    Asked(("sun", "gray_frame", "sky"), "have_shape", "How many pictures have a circle?", "2"),
    Asked(("sun", "gray_frame", "sky"), "shape_in", "What shape is in picture 2?", "square"),
    Asked(("pink_outline", "two_pink_circles"), "have_color", "How many pictures have a pink shape?", "2"),
    Asked(("sail", "tall_card"), "count_in", "How many shapes are in picture 1?", "2"),
    Asked(("sail", "tall_card"), "yesno_in", "Is there a green triangle in picture 1?", "yes"),
    Asked(("red_circle", "blue_x"), "yesno_in", "Is there a red circle in picture 2?", "no"),
    Asked(("sail", "tall_card"), "shape_in", "What shape is purple in picture 1?", "square"),
    Asked(("sail", "tall_card"), "color_in", "What colour is the square in picture 2?", "yellow"),
)
