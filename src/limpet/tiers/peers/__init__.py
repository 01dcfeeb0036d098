"""Copies of files between the memory of hosts: a server and a client on each rank.

Terms: a *peer* is a rank that holds a copy of another rank.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, and ``tiers``.
"""
