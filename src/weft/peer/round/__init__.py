"""A round as a member runs it: the pure machine of `weft.sync.round`, with its letters, payloads, merges and timers.

    inbox       what others say, whether it may be believed, and when the machine hears of it
    merge       which payloads are fetched (`payloads` holds them), and what is made of them
    members     who is here, and has a vote
    acts        what stewards, voters and liars bring into a manifest
    verdicts    what members find of each other's work, until it is dealt with
    driver      the machine's inputs and outputs, joined

It does not know how a peer came in, nor what is done between rounds.
"""
