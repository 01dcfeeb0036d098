"""Notices that this process will be stopped: their sources, and the exit codes that follow.

Terms: a *notice* is a message that the process will be stopped. Its *deadline* is the time of that
stop. A *source* reports notices.
May import: the root modules, and ``ranks``.
"""
