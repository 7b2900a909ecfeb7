"""`weft compose`: members that were trained with no contact, and what is made of several."""
