"""What members sign of the texts that they compute.

    receipt    what is signed, and how a member makes it
    witness    what who asks does with it: signatures hold, and neighbours say the same
    collected  of all texts of one that asks
    audit      rows computed again, and what that says of a member

It knows no path and no network: whoever asks hands it what came.
"""
