"""muster: brings MLX distributed groups up across machines, and keeps them up."""

__version__ = "0.1.0"
