"""What signed records come to: the charter after acts, members struck out by proof, work of branches that ended.

It does not know how a record reached anybody.
"""
