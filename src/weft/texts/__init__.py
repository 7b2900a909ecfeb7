"""Texts by members of a run: each stage's computes its layers, whoever asks keeps the text. A whole model is one stage.

    text, sequence    what the two sides decide: pure
    path              which members, one of each stage
    member, entry     the same with a network and a device; held: what a member has of one text
    forms             answers of a form
    receipts          receipts of what was computed

It knows tokens and no rounds: whose weights are served, and which members there are, is handed in.
"""
