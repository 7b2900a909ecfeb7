"""The page of `weft watch`: what a browser asks for, and what it is told as it happens.

It does not know where events come from.
"""
