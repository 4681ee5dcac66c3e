"""Coordination payloads, their scope, ports, and formation: the only code that knows MLX's variables."""
