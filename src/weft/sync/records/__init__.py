"""What is signed, sent and kept of rounds: letters, manifests, acts, the charter, where branches part.

It does not know what follows from a record.
"""
