"""The command line: one verb per file. Files of a verb import little; what is heavy they import when they run.

`main` is the table of verbs. It is the only room that reads the environment.
"""
