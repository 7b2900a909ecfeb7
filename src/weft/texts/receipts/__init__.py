"""Receipts of what members computed of texts: made, compared, and audited. None holds a text up, or changes it.

receipt, fingerprint    what is signed of some rows: pure
signing                 a member makes them as it computes
witness                 whoever asks compares those of neighbours
audit                   rows are computed again
"""
