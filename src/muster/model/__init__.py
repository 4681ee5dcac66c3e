"""Everything about an mlx-lm model that one rank needs: its files, its sharding plan, its weights, its tokens.

`params`, `headers`, `hub`, `files` and `plan` import neither mlx nor mlx-lm (`plan.supports` does when called), so
that any process can judge a model. `load`, `prompt` and `generate` belong into the runner's process.
"""
