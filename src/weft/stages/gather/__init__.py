"""The sections of a model together again: from those who hold them, by a member or by a visitor, into one checkpoint.

It does not know how sections are trained.
"""
