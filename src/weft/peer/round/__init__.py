"""A round as a member runs it: the pure machine of `weft.sync.round`, with its letters, payloads, merges and timers.

    inbox       what others say, and when the machine hears of it
    gather      which payloads are fetched; `payloads` holds them
    merge       parts and results
    driver      the machine's inputs and outputs, joined

It does not know how a peer came in, nor what is done between rounds.
"""
