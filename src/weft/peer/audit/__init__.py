"""Audits, at both ends: what a worker names and keeps of its training steps, and what an auditor asks of it.

heads      what this peer knows of the states that segments begin at
trace      a worker's states, named one after the other, and what is needed to come to them again
worker     shows states to whoever was drawn
auditor    draws, asks, does the steps again, and says what came of it
"""
