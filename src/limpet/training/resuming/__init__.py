"""Whether a resumed training continues exactly: what the state lacks, and what a resume has kept.

Terms: a *gap* is something that changes during a training and is not in its state.
May import: the root modules, ``format``, ``data``, ``layout``, ``ranks``, ``state``, ``snapshot``,
``saving``, ``loading``, ``convert``, ``run``, and ``training``.
"""
