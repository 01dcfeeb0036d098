"""Makes one snapshot from another: copies it, or writes it with other shards.

May import: the root modules, ``format``, and all other packages of the engine.
"""
