"""Verbs that look at a run: status, watch, report, compare."""
