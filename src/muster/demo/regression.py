"""The demo's script: every rank fits the same line to its own part of the data, sharing gradients.

It is an ordinary MLX script; nothing in it knows of muster.
"""

import mlx.core as mx

group = mx.distributed.init()
rank, size = group.rank(), group.size()

mx.random.seed(rank)
x = mx.random.uniform(-1, 1, (256,))
y = 3.0 * x + 0.5 + 0.01 * mx.random.normal((256,))


def loss(parameters: mx.array) -> mx.array:
    return mx.mean((parameters[0] * x + parameters[1] - y) ** 2)


parameters = mx.zeros((2,))
for step in range(1, 61):
    gradient = mx.distributed.all_sum(mx.grad(loss)(parameters)) / size
    parameters = parameters - 0.3 * gradient
    mx.eval(parameters)
    if step % 20 == 0:
        print(f"step {step}: loss {loss(parameters).item():.5f}")

slope, offset = parameters[0].item(), parameters[1].item()
print(f"rank {rank} of {size}: y = {slope:.2f} x + {offset:.2f}")
