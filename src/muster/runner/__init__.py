"""The subprocess that is one rank of one attempt: group, model or script, steps."""
