"""Snapshots in memory and on local disks: what they cost, where they are, how they get there.

Terms: a *tier* is a store with a speed (memory, local, durable). A *copy* is a rank's shard on one
host; ``copies`` counts the local one. A *snapshot* in a tier is all copies of one state; a
*promotion*, or a *flush* at the end, commits it to the run. A *domain* is what fails as a whole: a
host, or what a label names. A *restart* is a start under ``limpet run`` that has resumed. It counts
until it has ended well, or a state newer than its *goal* exists. The *restore ladder* decides what
a resume leaves out after restarts without progress. A *rung* is one step of it.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, ``run``, ``notices``, and ``tiers``.
"""
