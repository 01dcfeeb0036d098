"""Import of the checkpoint formats of other libraries. No code in a file is executed.

Terms: a *foreign* checkpoint is one that another library wrote.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, and ``convert``; not ``run``.
"""
