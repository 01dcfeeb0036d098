"""An elastic training of several ranks and hosts under attack: ``python -m tests.chaos``.

``schedule`` decides what happens and when, ``training`` is one rank, ``cluster`` has the hosts and
the disk, ``supervisor`` starts and disturbs the ranks as a scheduler would, ``evaluator`` follows
the run and is disturbed as well, and ``report`` compares the result with that of an undisturbed
training, and prints the table.

``make chaos ARGS="--seconds 600 --seed 7"`` makes one event after the other; ``--every 120`` one
every two minutes. The seed determines the events; the steps at which they hit also depend on the
load of the machine. After each event, the training starts again, on 4, 3, or 2 ranks. The table
shows, for each event, the exit codes, the steps lost, where the state came from, and the seconds
until the end of the job was known, all ranks had joined, and ``resume()`` had returned. The exit
code is 1 unless:

- each step that counts used the samples of an undisturbed training, in its order;
- the last version has the same bits, or, on another number of ranks, values within 1e-6;
- the state was back at most 10 s after the last rank had joined;
- each rank left with a code of the exit contract, after a notice before its end, and with 75 only
  if its last step is in the run;
- all versions that no event has damaged verify, and the last one is evaluated as in one process;
- with ``--every 120``, at least 0.95 of the time was spent on steps that count.
"""
