"""The verbs that store a small record about versions: pin and attest.

Terms: those of the command line, and of ``run``.
May import: the root modules, ``format``, ``storage``, ``sinks``, ``engine``, ``interop``,
``run``, ``preemption``, ``tiers``, ``training``, and ``cli``.
"""
