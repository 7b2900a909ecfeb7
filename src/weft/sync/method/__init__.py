"""What a method is: five choices, the presets that name some of them, learning rates, graphs of neighbours.

It computes nothing on vectors (`weft.sync.merge` does), and needs no torch.
"""
