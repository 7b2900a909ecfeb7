"""What was computed, and by whom, in few bytes that name all of it; without torch."""
