"""Trains the demo checkpoint from nothing: what train.py, evaluate.py and their tests share."""
