"""Language models ready for use: prompts and contexts in, scores and written text out."""
