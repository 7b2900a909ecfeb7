"""Texts beside training: what a peer draws them with, and how much of its device they take.

    share      a share of the device
    versions   which rounds' weights are held: pure
    serving    both, for what a peer trains

It knows no peer and no stage's rounds: whoever trains tells it of the weights after a round.
"""
