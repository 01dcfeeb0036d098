"""Adapters that let other libraries save and load through this engine. They decide nothing.

Terms: an *integration* is a module that serves one other library.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, and ``run``.
"""
