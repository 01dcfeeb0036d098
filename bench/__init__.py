"""The benchmark that ``make bench`` starts: every figure a ratio taken in one run on one machine.

``python -m bench`` runs all of it and writes ``docs/benchmarks.md``; ``--quick`` tries the harness
on small sizes; ``--only save_load,small`` selects topics. Each topic is one file with a
``sections(options)`` that the parent calls and functions that run in fresh child processes.
"""
