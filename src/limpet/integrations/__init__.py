"""Adapters that let other libraries save and load through this engine. They decide nothing.

Terms: an *integration* is a module that serves one other library. A *framework* is a library that
has the training loop: its integration translates the hooks of the loop to ``Checkpointer``.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``data``, ``snapshot``, ``saving``, ``loading``, ``convert``, ``notices``, ``run``, and
``training``.
"""
