"""``Checkpointer`` and its parts: when to save, how to resume, and how a training ends.

Terms: the *cadence* decides when a save is due. In an evaluation inside the training, a *round* is
one batch on each rank, and a *share* is what one rank has evaluated.
May import: the root modules, ``format``, ``storage``, ``data``, ``sinks``, ``layout``, ``ranks``,
``state``, ``snapshot``, ``saving``, ``loading``, ``convert``, ``evaluation``, ``notices``, ``run``,
``tasks``, ``tiers``, and ``training``.
"""
