"""The slots of an optimizer: a comparison with the live ones, and the memory into which they load.

Terms: a *slot* is one value that an optimizer keeps for a parameter, such as a moment.
May import: the root modules, ``format``, and from the engine ``planning``, ``state``, and
``loading``.
"""
