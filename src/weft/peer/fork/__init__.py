"""Branches: whose word moves a peer to another one, who is watched, and when a branch is opened.

It does not know how a state is fetched.
"""
