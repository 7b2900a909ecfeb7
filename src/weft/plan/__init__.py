"""What a run will take before anybody joins: seconds, bytes, memory, energy, money, and which method suits it; and how
fast its model will answer.

It knows figures of machines and lines, and touches none.
"""
