"""The benchmark that ``make bench`` runs. Every figure is a ratio from one run on one machine.

``python -m bench`` runs all topics and writes ``build/benchmarks.md``. ``--quick`` tests them
with small sizes. ``--only save_load,small`` selects topics. Each topic is one file: the parent
process calls its ``sections(options)``, and its other functions run in fresh child processes.
"""
