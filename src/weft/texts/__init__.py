"""Texts by members of a run: each stage's computes its layers, whoever asks keeps the text. A whole model is one stage.

    asking            the side of whoever asks: which members, and what they are told
    sequence          what a member decides: pure
    member            the same with a network and a device; held: what it has of one text
    forms             answers of a form
    receipts          receipts of what was computed

It knows tokens and no rounds: whose weights are served, and which members there are, is handed in.
"""
