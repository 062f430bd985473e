"""Models that come with jzero: ordinary Flax NNX modules that know nothing of ZeRO."""
