"""Notices that this process will be stopped: their sources, and the exit codes that follow.

Terms: a *notice* says that the process will be stopped, its *deadline* is the time of that stop,
and a *source* reports notices.
May import: the root modules, and ``ranks``.
"""
