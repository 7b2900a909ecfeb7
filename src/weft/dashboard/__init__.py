"""What people see of a run: events folded into figures and sentences. It reads events and disturbs nobody."""
