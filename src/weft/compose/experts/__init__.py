"""Models trained on text of their own, and asked together: ensembles, soups, mixtures (BTM, c-BTM, BTX)."""
