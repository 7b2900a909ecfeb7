"""A model in stages that serves texts, played: production entries, members and routing; only computing is reckoned.

It does not know what a text says: which token comes where is agreed on beforehand.
"""
