"""Make one snapshot from another: copy it, or write it again with other shards (*reshard*).

May import: the root modules, ``format``, and all other packages of the engine.
"""
