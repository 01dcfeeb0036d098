"""The saves of a training: what is in flight, what a version stores, and the checks of versions.

Terms: *goodput* is the share of wall time spent on steps that a committed version holds.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, ``notices``, ``run``, ``tiers``, and
``training``.
"""
