"""The sources of notices: signals, files, callables, clouds, and schedulers.

Terms: a *platform* is a cloud or a scheduler with notices of its own. A *metadata server* is the
HTTP server through which a cloud describes a virtual machine to the programs on it.
May import: the root modules, and ``preemption``.
"""
