"""What `muster demo` shows, and the small model that it serves."""
