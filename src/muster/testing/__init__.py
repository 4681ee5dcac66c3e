"""Stand-ins for what machines without Macs, Thunderbolt or a hub lack; for tests of muster and of what uses it."""
