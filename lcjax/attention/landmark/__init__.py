"""Landmark attention: the pattern, its retrieval from a cache, and landmark tokens in texts."""
