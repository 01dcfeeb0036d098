"""Holdfast keeps the state of a training run safe, and carries the run across what stops it."""
