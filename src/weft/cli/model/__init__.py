"""Verbs on a trained model: generate, eval, export, inspect, and `weft tokenizer`."""
