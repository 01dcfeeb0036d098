"""The commands, one module per verb, each with a click command named ``command``.

Terms: as in ``cli``.
May import: the root modules, ``format``, ``storage``, ``sinks``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``run``, ``convert``, ``notices``, ``tables``, ``tasks``,
``tiers``, ``evaluation``, ``training``, ``report``, and ``cli``.
"""
