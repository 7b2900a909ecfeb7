"""One layer computed by several peers that have good links to each other: by heads, or by segments of the sequence.

It knows no stages: whoever gathers a team, and computes undivided where that breaks, is above it.
"""
