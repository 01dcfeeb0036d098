"""Decide which rank writes and reads which boxes. Pure arithmetic: no I/O and no torch.

Terms: a *box* is a rectangle of a global tensor; a *leaf box* is one box of one leaf that a rank
has; a *chunk* is the unit that one digest covers.
May import: the root modules and ``format``; neither ``buffers`` nor ``threads``.
"""
