"""`weft serve`: a model answers over the OpenAI API; its API keys."""
