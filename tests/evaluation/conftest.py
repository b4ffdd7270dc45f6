"""Makes this folder's support modules importable from the folders below it."""
