"""A small world of coloured shapes: seeded pictures, questions about them, and the right answers.

For training and testing the demo checkpoint, and for checking answers under load. Everything is a pure function of a numpy
Generator. `generator` gives one for training or one for held-out questions; those two never meet.
"""

from triptych.loadgen.world.colors import COLORS
from triptych.loadgen.world.examples import Example, chance, corpus, held_out_examples, make_example
from triptych.loadgen.world.picture import CELL_PX, Spot, pick_cells, pick_size, render
from triptych.loadgen.world.questions import Question, ask_many, ask_one, pick_tasks
from triptych.loadgen.world.scene import PLACES, SHAPES, Scene, Shape, make_scene, multi_scenes
from triptych.loadgen.world.seeds import generator
from triptych.loadgen.world.tasks import ADVERTISED, MANY_PICTURES, ONE_PICTURE, TASKS, TEXT, WORDINGS
from triptych.loadgen.world.text import MEMORISED, ask_text

__all__ = [
    "ADVERTISED",
    "CELL_PX",
    "COLORS",
    "MANY_PICTURES",
    "MEMORISED",
    "ONE_PICTURE",
    "PLACES",
    "SHAPES",
    "TASKS",
    "TEXT",
    "WORDINGS",
    "Example",
    "Question",
    "Scene",
    "Shape",
    "Spot",
    "ask_many",
    "ask_one",
    "ask_text",
    "chance",
    "corpus",
    "generator",
    "held_out_examples",
    "make_example",
    "make_scene",
    "multi_scenes",
    "pick_cells",
    "pick_size",
    "pick_tasks",
    "render",
]
