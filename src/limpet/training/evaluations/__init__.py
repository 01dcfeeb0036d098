"""Evaluation inside the training job, with the parameters that are being trained.

Terms: a *round* is one batch on each rank. A *share* is what one rank has evaluated.
May import: the root modules, ``format``, ``layout``, ``ranks``, ``state``, ``snapshot``,
``saving``, ``loading``, ``convert``, ``evaluation``, ``run``, and ``training``.
"""
