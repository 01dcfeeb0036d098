"""The save recipe, ``save.py``, and its steps. Each step returns to the recipe.

Terms: the *image* of a shard is its content before the file exists; *staging* copies the image from
the live state into host buffers; a *receipt* states what a rank wrote.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, and ``loading``.
"""
