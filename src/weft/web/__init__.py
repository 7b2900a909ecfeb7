"""What weft's pages share: their look, and how a browser is given them. It knows no run and no model."""
