"""The OpenAI API over texts of an engine: what is asked for, who may ask, and how it is answered.

    request ─schemas─► Plan ─generation─► engine's texts ─text, tools─► Deltas ─chat, completions, responses─► answer

It knows no run and no file of a model: whoever begins it gives `Model`s, which it looks up anew for each request.
"""
