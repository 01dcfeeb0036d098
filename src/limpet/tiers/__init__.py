"""Snapshots in memory and on local disks: what they cost, where they are, how they get there.

Terms: a *tier* is a store with a speed (memory, local, durable). A *copy* is a rank's shard on one
host; ``copies`` counts the local one. A state in a tier is *captured*; a *promotion* commits one to
the run. A *generation* is all copies of one version. A *domain* is
what fails as a whole: a host, or what a label names. A *peer* is a rank that holds a copy of
another rank.
May import: the root modules, ``format``, ``connections``, ``storage``, ``layout``, ``ranks``,
``state``, ``snapshot``, ``saving``, ``loading``, ``convert``, ``run``, ``preemption``, and
``tiers``.
"""
