"""The restore ladder: what a training resumes from after restarts that made no progress.

Terms: a *restart* is one start of a training under ``limpet run`` that has resumed. It counts
until it has ended well, or a state newer than its *goal* exists. A *rung* says what a resume
leaves out.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, ``run``, ``preemption``, and ``tiers``.
"""
