"""The engines that compute logits: llama.cpp, transformers, and a fake one without a model."""
