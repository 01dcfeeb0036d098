"""The load recipe, ``load.py``, and its steps, each of which returns to the recipe.

Terms: *binding* matches the live state with a snapshot's tree; a *target* is the memory into which
a leaf is read. The public ``Snapshot`` is here, because it can load itself.
May import: the root modules, ``format``, ``storage``, ``sinks``, ``layout``, ``ranks``, ``state``,
and ``snapshot``.
"""
