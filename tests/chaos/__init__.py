"""An elastic training of several ranks and hosts under attack: ``python -m tests.chaos``.

``schedule`` decides what happens and when, ``training`` is one rank, ``cluster`` has the hosts and
the disk, ``supervisor`` starts and disturbs the ranks as a scheduler would, ``evaluator`` follows
the run and is disturbed as well, and ``report`` compares the result with that of an undisturbed
training, and prints the table.
"""
