"""The engine: moves a training state to and from a store.

Terms: a *state* is flattened into *leaves*, planned as *boxes*, and written as *shards* that one
*manifest* commits. The packages, from the bottom up: ``planning`` and ``distributed``; ``state``
and ``snapshot``; ``saving`` and ``loading``; ``transform``.
May import: the root modules, ``format``, and ``storage``; neither ``data`` nor ``sinks``.
"""
