"""`weft chat`: a conversation at the terminal with any server that speaks the OpenAI API."""
