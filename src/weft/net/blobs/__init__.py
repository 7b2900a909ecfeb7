"""Bytes by digest: fetched from whoever holds them, in ranges, on several streams, or through a member in the middle.

It does not know what the bytes are, nor why they are wanted.
"""
