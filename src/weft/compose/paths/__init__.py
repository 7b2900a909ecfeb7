"""Paths through modules that several paths share (DiPaCo): who trains what, and which path a text takes.

    levels ──► modules ──► play: inner steps of each path, outer steps of each module
                  │
    routing ──► shards of documents ◄── resharding, by what paths have become best at
        │
        └──► reading: texts along the paths that a router chooses, once or again and again

It knows no peers. A module can be a run of its own, as a stage is one, whose members are the peers whose paths contain
it.
"""
