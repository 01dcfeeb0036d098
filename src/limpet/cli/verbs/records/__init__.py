"""The verbs that take steps of a run: pin and rm.

Terms: those of the command line, and of ``run``.
May import: the root modules, ``format``, ``storage``, ``sinks``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``run``, ``notices``, ``tiers``,
``training``, and ``cli``.
"""
