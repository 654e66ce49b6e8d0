"""Measures a checkpoint of the demo's world: what evaluate.py and the tests share."""
