"""The run file of somebody's own text or conversations: what is asked for it, and what it says."""
