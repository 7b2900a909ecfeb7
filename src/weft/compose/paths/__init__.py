"""Paths through modules that several paths share (DiPaCo): who trains what, and which path a text takes."""
