"""What `python eval.py` does: it runs a config, and works on runs that are on disk."""
