"""Everything about an mlx-lm model that one rank needs: its files, sharding plan, weights, tokens and text.

`headers`, `hub`, `files` and `plan` import neither mlx nor mlx-lm (`plan.supports` does when called), so that any
process can judge a model. The rest belongs into the runner's process: `load` and `batch` on every rank, `request` and
`answer` with what they use on rank 0.
"""
