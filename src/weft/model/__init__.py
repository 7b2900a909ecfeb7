"""The model: one decoder family, its flat vector, its first weights, and Hugging Face folders in and out.

It knows no data, no optimizer, no network.
"""
