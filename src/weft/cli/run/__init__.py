"""Verbs that take part in a run, or speak to one: train, join, anchor, gather, pause, act, ticket, keys."""
