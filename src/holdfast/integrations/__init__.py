"""Adapters that let other libraries save and load through this engine. They decide nothing.

May import: every package below: ``run``, ``engine``, ``storage``, ``format``, and the root modules.
"""
