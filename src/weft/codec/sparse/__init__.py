"""Vectors of which few values are sent: which, and what they are."""
