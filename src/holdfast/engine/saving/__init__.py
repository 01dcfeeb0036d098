"""The save recipe, ``save.py``, and its steps. Each step returns to the recipe.

Terms: the *image* of a shard is its bytes before they are a file; *staging* copies them off the
live state; a *receipt* states what a rank wrote.
May import: the root modules, ``format``, and the packages of the engine except ``loading`` and
``transform``.
"""
