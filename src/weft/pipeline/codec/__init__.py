"""What crosses the boundary between two sections: activations one way, gradients back, as few bytes.

It does not know who sends them.
"""
