"""Tests of the restore ladder."""
