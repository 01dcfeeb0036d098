"""The commands, one module per verb, each with a click command named ``command``.

May import: everything below ``cli``, and the modules of ``cli`` itself.
"""
