"""Conversations as the text that a chat model was trained on: templates, and their tokens."""
