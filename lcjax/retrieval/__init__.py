"""Retrieval: passages of a datastore, found by words or by vectors, for models that read them."""
