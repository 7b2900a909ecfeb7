"""Whoever asks for texts: its side of each, which no member sees whole.

text       what it decides, message by message: pure
path       which members, one of each stage: pure
course     which it has come by so far, and where others took over: pure
patience   how long it waits for a token: pure
under_way  the same with a network, for one text
entry      all of its texts, as an engine
"""
