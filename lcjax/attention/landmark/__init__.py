"""Landmark attention: the pattern, its retrieval from a cache, and landmark tokens among text."""

from lcjax.attention.landmark.pattern import LOSSES, SELECT, Landmark

__all__ = ["LOSSES", "SELECT", "Landmark"]
