"""Any Flax NNX model becomes a ZeRO run, unchanged: a small convolutional classifier at stage 3 on 8 fake devices."""

import jax
import numpy as np
import optax
from flax import nnx

import jzero

jax.config.update("jax_num_cpu_devices", 8)  # has no effect on real accelerators


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        return self.out(nnx.relu(self.norm(self.conv(images))).mean(axis=(1, 2)))


def loss_fn(model, batch):  # (sum of losses, weight) and sums to log; the mean is taken once, over the whole mesh
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.sum(), losses.size, {"correct": (logits.argmax(-1) == batch["label"]).sum()}


labels = np.arange(256) % 10  # the label is written into the picture, as its brightness
images = np.random.default_rng(0).normal(labels[:, None, None, None] / 3, 1, (256, 8, 8, 1)).astype(np.float32)
batch = {"image": images, "label": labels}
run = jzero.setup(lambda: Classifier(nnx.Rngs(0)), loss_fn, optax.adam(2e-2), "dp=8", batch, stage=3)
state = run.init()
for step in range(61):
    state, metrics = run.step(state, batch)
    if step % 20 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}, {int(metrics['correct'])} of 256 right")
print("one kernel at rest:", run.specs.params["out"]["kernel"], "| a device holds", run.at_rest_bytes(), "bytes")
