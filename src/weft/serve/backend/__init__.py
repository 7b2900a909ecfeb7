"""Another server of the OpenAI API behind this one, such as vLLM's or llama.cpp's: keys, limits, page and figures are
weft's, texts are the other's.
"""
