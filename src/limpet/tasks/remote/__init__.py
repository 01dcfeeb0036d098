"""Tasks for workers in other processes, over one socket per worker.

Terms: the *owner* is the process that has the queue; a *report* says what became of a task.
May import: the root modules, ``format``, ``connections``, and ``tasks``. Nothing is pickled.
"""
