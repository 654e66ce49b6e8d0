"""Trains the demo checkpoint from nothing: what train.py, evaluate.py and their tests share.

Read recipe (what is trained, and how long), then trainer (the loop). A step: pictures and rows (what is drawn and asked) ->
batches (packed, made ahead) -> forward -> losses -> optimizer. Around it: model and tokenizer (what is saved), state (to go on
from), progress (what is printed).
"""
