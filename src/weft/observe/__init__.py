"""A run seen from outside: what peers tell whoever watches, who listens, and what of it can be checked.

It does not know how anything is shown, and takes no part in rounds.
"""
