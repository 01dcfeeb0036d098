"""Tensors that consist of other tensors: sparse ones, and those of other classes.

Terms: an *inner* tensor is an attribute of a tensor of a class with ``__tensor_flatten__``.
May import: the root modules, ``format``, and from the engine ``state``.
"""
