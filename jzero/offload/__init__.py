"""Optimizer state, gradients and parameters that rest outside of the device."""
