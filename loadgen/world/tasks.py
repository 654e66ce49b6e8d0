"""The tasks: how much each counts in training, its wordings, and which of them the demo checkpoint is good at."""

from __future__ import annotations

# Task and its weight in training
ONE_PICTURE = {
    "color_of": 1.2,
    "shape_of": 1.5,
    "count": 0.8,
    "count_color": 1.2,
    "where": 1.2,
    "what_at": 1.0,
    "list": 1.6,
    "yesno": 1.8,
    "one_picture": 0.15,
}
MANY_PICTURES = {
    "pictures": 0.4,
    "which": 2.0,
    "have_shape": 1.3,
    "have_color": 1.3,
    "color_in": 1.3,
    "shape_in": 1.3,
    "count_in": 0.6,
    "yesno_in": 1.5,
    "list_in": 1.3,
}
TEXT = {"day": 0.6, "larger": 1.3, "repeat": 1.0, "sort": 1.3, "add": 1.3}
TASKS = (*ONE_PICTURE, *MANY_PICTURES, *TEXT)

# All wordings. {thing}: "circle" or "red circle", and "shape" in a picture with only one; {a_thing}: the same with "a" or "an".
# "colour" and "grey" are understood in questions; answers say "gray".
WORDINGS: dict[str, tuple[str, ...]] = {
    "color_of": ("What color is the {shape}?",),
    "shape_of": ("What shape is {color}?", "What shape is the {color} one?"),
    "count": ("How many shapes are there?",),
    "count_color": ("How many {color} shapes are there?",),
    "where": ("Where is the {thing}?",),
    "what_at": ("What is in the {place}?",),
    "list": ("Describe the picture.", "What is in the picture?"),
    "yesno": ("Is there {a_thing}?",),
    "one_picture": ("How many pictures are there?",),
    "pictures": ("How many pictures are there?",),
    "which": ("Which picture has {a_thing}?",),
    "have_shape": ("How many pictures have a {shape}?",),
    "have_color": ("How many pictures have {a_color} shape?",),
    "color_in": ("What color is the {thing} in picture {number}?",),
    "shape_in": ("What shape is in picture {number}?", "What shape is {color} in picture {number}?"),
    "count_in": ("How many shapes are in picture {number}?",),
    "yesno_in": ("Is there {a_thing} in picture {number}?",),
    "list_in": ("Describe picture {number}.",),
    "day": ("What day comes after {day}?",),
    "larger": ("Which is larger, {first} or {second}?",),
    "repeat": ("Repeat: {words}",),
    "sort": ("Sort the letters: {letters}",),
    "add": ("What is {first} + {second}?",),
}

# one_picture has only one answer; the others are not learned well enough (the model card has the numbers).
NOT_ADVERTISED = ("one_picture", "which", "have_shape", "have_color")
ADVERTISED = tuple(task for task in TASKS if task not in NOT_ADVERTISED)
