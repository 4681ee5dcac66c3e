"""The publishing process: owns the event log, decides placement and lifecycle, serves the API."""
