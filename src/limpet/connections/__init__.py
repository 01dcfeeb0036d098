"""Authenticated TCP connections between the processes of a job.

Terms: the *secret* is a text that only the processes of the job know; a *session* is what both
sides of a connection use to authenticate their messages.
May import: the root modules.
"""
